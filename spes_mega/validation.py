"""What pydantic finds wrong with a mapping, told to whoever wrote it."""

import difflib
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN = 20
"""Faults that are told at a time."""

Key = tuple[int | str, ...]
Source = str | Callable[[Key], str]
"""Where a mapping comes from, or where the value of a key does."""


def explain(source: Source, error: ValidationError, top: type[BaseModel]) -> list[str]:
    """One line for each fault: file, key, what was wrong, and for an unknown key the nearest known one.

    A fault of a section as a whole has as its files those of the fields that the message names.
    """
    lines = []
    for fault in error.errors()[:_SHOWN]:
        loc = fault["loc"]
        key = ".".join(str(part) for part in loc)
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(loc[-1]), _known_keys(top, loc[:-1]), n=1)
            message = "unknown key" + (f"; did you mean {near[0]}?" if near else "")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            if fault["type"] not in ("value_error", "missing"):
                message += f" (got {shortened(repr(fault['input']))})"
        keys = (fault["type"] == "value_error" and _fields_named(top, loc, message)) or [loc]
        origins = [source if isinstance(source, str) else source(one) for one in keys]
        lines.append(f"{' and '.join(dict.fromkeys(origins))}: {key + ': ' if key else ''}{message}")
    more = error.error_count() - _SHOWN
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def shortened(text: str) -> str:
    """A text as a message may have it, however long it is."""
    return text if len(text) <= 200 else f"{text[:150]}… ({len(text):,} characters)"


def _known_keys(top: type[BaseModel], loc: Key) -> list[str]:
    section = _annotation(top, loc)
    return list(section.model_fields) if _is_section(section) else []


def _fields_named(top: type[BaseModel], loc: Key, message: str) -> list[Key]:
    """Keys of the fields of the section at `loc` that a message has, such as num_nodes, or train.lr at the top."""
    words = [tuple(word.split(".")) for word in re.findall(r"[a-z_]\w*(?:\.\w+)*", message)]
    if not _is_section(_annotation(top, loc)):
        return []
    kinds = {loc + word: _annotation(top, loc + word) for word in words}
    return [key for key, kind in kinds.items() if kind is not None and not _is_section(kind)]


def _annotation(top: type[BaseModel], loc: Key) -> Any:
    """Of a field, or the section at `loc`; None if there is none."""
    kind: Any = top
    for part in loc:
        if not _is_section(kind) or part not in kind.model_fields:
            return None
        kind = kind.model_fields[part].annotation
    return kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
