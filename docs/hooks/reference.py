"""A hook of mkdocs: the pages on commands and recipe fields are made from the code, so that they cannot be out of date.

A page has a line `<!-- commands -->` or `<!-- recipe -->`, which is replaced by what the installed version says.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spes_mega.cli import COMMANDS, group
from spes_mega.recipe import Recipe, is_local


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its marked lines replaced; mkdocs calls this for every page."""
    for marker, lines in GENERATED.items():
        if marker in markdown:
            markdown = markdown.replace(marker, "\n".join(lines()))
    return markdown


def commands() -> Iterator[str]:
    """Yield one section for each command, with its arguments and options as `--help` has them."""
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None, f"{name} is listed and cannot be loaded"
        yield from _command(command, f"spes-mega {name}", "##")


def _command(command: click.Command, name: str, heading: str) -> Iterator[str]:
    with click.Context(command, info_name=name) as ctx:
        yield from (f"{heading} {name}", "", "```text", " ".join((name, *command.collect_usage_pieces(ctx))), "```", "")
        yield from _help(command.help or "")
        records = [parameter.get_help_record(ctx) for parameter in command.params]
    options = [record for record in records if record and record[1]]
    if options:
        yield from ("| option | meaning |", "|---|---|")
        yield from (f"| `{_cell(names)}` | {_cell(_escaped(text))} |" for names, text in options)
        yield ""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _command(inner, f"{name} {inner.name}", heading + "#")


def _help(text: str) -> Iterator[str]:
    """Yield a help text as Markdown: what click leaves as it is (after \\b) becomes a block of code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            yield from (_escaped(paragraph), "")
            continue
        title, *lines = paragraph.removeprefix("\b\n").splitlines()
        yield from (_escaped(title), "", "```text", *(line.removeprefix("  ") for line in lines), "```", "")


_HEAD = ("| field | value | default | meaning |", "|---|---|---|---|")


def fields() -> Iterator[str]:
    """Yield one table for each section of the recipe, and one for the fields that are in none."""
    properties = Recipe.model_json_schema()["properties"]
    sections = {name: section for name, field in Recipe.model_fields.items() if (section := _section_of(field))}
    single = (name for name in Recipe.model_fields if name not in sections)
    yield from (*_HEAD, *(_field(name, Recipe.model_fields[name], properties[name]) for name in single))
    for name, section in sections.items():
        summary = inspect.cleandoc(section.__doc__ or "").splitlines()[0]
        yield from ("", f"## {name}", "", _escaped(summary), "", *_HEAD, *_section(section, name))


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        if inner := _section_of(field):
            yield from _section(inner, f"{path}.{name}")
        else:
            yield _field(f"{path}.{name}", field, properties[name])


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _field(path: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    default = "required" if field.is_required() else f"`{_value(field.default)}`"
    meaning = " ".join(filter(None, ("**local.**" if is_local(field) else "", _escaped(field.description or ""))))
    return f"| `{path}` | {_cell(_kind(schema))} | {default} | {_cell(meaning)} |"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value)


_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_BOUNDS = {"exclusiveMinimum": "over", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}


def _kind(schema: dict[str, Any]) -> str:
    """Return in words what a JSON schema takes, but for null, which the default shows."""
    if choices := schema.get("anyOf"):
        kinds = dict.fromkeys(_kind(choice) for choice in choices if choice.get("type") != "null")
        return " or ".join(kinds) or "anything"
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        return f"list of {_KINDS.get(items.get('type', ''), 'list')}s"
    if schema.get("type") == "object":
        return "mapping"
    bounds = [f"{word} {schema[key]:,}" for key, word in _BOUNDS.items() if key in schema]
    return " ".join(filter(None, (_KINDS[schema["type"]], ", ".join(bounds))))


def _escaped(text: str) -> str:
    """Return plain text as Markdown, with options such as --set set as code and nothing taken for markup."""
    text = text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


GENERATED: dict[str, Callable[[], Iterator[str]]] = {"<!-- commands -->": commands, "<!-- recipe -->": fields}
