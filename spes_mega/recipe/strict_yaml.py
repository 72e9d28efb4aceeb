"""YAML as recipes need it: what JSON can say, each key once, within bounds.

Safe YAML still lets a few bytes stand for gigabytes (aliases), hold itself, or silently take the last of two equal
keys. Dates are texts here, since no field is one.
"""

from typing import Any, cast

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

MAX_DEPTH = 50
MAX_VALUES = 500_000
"""In all, with each alias counted as what it stands for."""
_DATE = "tag:yaml.org,2002:timestamp"
_MERGE = "tag:yaml.org,2002:merge"
_NAME = "tag:yaml.org,2002:str"
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


class YamlError(ValueError):
    """Text that is not YAML of this kind; the message has the line."""

    def __init__(self, message: str, line: int | None = None) -> None:
        """`line` counts from 1."""
        super().__init__(message)
        self.line = line

    def located(self, source: str, *, single: bool = False) -> str:
        """The message after its source and line. `single`: the source is one line, which needs no number."""
        place = source if single or self.line is None else f"{source}:{self.line}"
        return f"{place}: not valid YAML: {self}"


class _Loader(yaml.SafeLoader):
    """PyYAML's, without dates, and with bounds that are checked before anything is constructed."""

    depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise YamlError(f"nested over {MAX_DEPTH} deep", self.peek_event().start_mark.line + 1)
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None:
            _Bounds().check(node)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except YamlError:
            raise
        except (ValueError, LookupError) as e:  # such as `!!float abc`, or thousands of digits
            shown = node.value if isinstance(node, ScalarNode) else node.tag
            raise YamlError(f"{_cut(shown)}: {_cut(str(e))}", _line(node)) from e
        if isinstance(value, int) and value.bit_length() > 63:
            raise YamlError(f"{_cut(node.value)}: a number of more than 63 bits", _line(node))
        return value


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Bounds:
    """Counts what a tree of nodes stands for."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def check(self, node: Node) -> int:
        """How many values `node` is. Raises YamlError: too many, one that holds itself, or one that JSON lacks."""
        if node.tag not in _TAGS:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise YamlError(f"{shown}: such values are not supported", _line(node))
        if not isinstance(node, CollectionNode):
            return 1
        if id(node) in self._open:
            raise YamlError("a value that holds itself", _line(node))
        if id(node) not in self._sizes:
            if isinstance(node, MappingNode):
                _check_keys(node)
            self._open.add(id(node))
            self._sizes[id(node)] = 1 + sum(map(self.check, _inner(node)))
            self._open.remove(id(node))
        if self._sizes[id(node)] > MAX_VALUES:
            raise YamlError(f"over {MAX_VALUES:,} values, with aliases counted as what they stand for", _line(node))
        return self._sizes[id(node)]


def _check_keys(node: MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if key.tag != _NAME:
            shown = _cut(key.value) if isinstance(key, ScalarNode) else "a list or mapping"
            raise YamlError(f"the key {shown} is not a name (quotes make it one)", _line(key))
        if key.value in lines:
            both = f"lines {lines[key.value]} and {_line(key)}"
            raise YamlError(f"the key {_cut(key.value)} stands there twice, in {both}", _line(key))
        lines[key.value] = _line(key)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document: None, bool, int of at most 63 bits, float, str, list, or dict with names as keys.

    Raises:
        YamlError: the text is not YAML, or says more than that; the message is one line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        told = ", ".join(part for part in (e.context, e.problem) if part)
        raise YamlError(_cut(" ".join(told.split()), 200), mark.line + 1 if mark else None) from e
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise YamlError(f"the character {chr(e.character)!r} is not allowed", line) from e
    except yaml.YAMLError as e:
        raise YamlError(" ".join(str(e).split())) from e


def _inner(node: CollectionNode) -> list[Node]:
    if isinstance(node, SequenceNode):
        return cast(list[Node], node.value)
    return [part for pair in node.value for part in pair]


def _line(node: Node) -> int:
    return cast(int, node.start_mark.line) + 1


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 10]}… ({len(text):,} characters)"
