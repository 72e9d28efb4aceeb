"""Command-line flags generated from a recipe section, so that a default is written only once."""

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from spes_mega.errors import RecipeError
from spes_mega.recipe import Section
from spes_mega.validation import explain

S = TypeVar("S", bound=Section)
Command = TypeVar("Command", bound=Callable[..., Any])


def recipe_options(section: type[Section]) -> Callable[[Command], Command]:
    """Add one option for each field of `section`; an option that is not given arrives as None."""

    def decorate(command: Command) -> Command:
        for name, field in reversed(section.model_fields.items()):
            command = _option(name, field)(command)
        return command

    return decorate


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    flag = "--" + name.replace("_", "-")
    kind = _click_type(field.annotation)
    if kind is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    description = (field.description or "").strip()
    default = "" if field.is_required() or field.default is None else f"[default: {field.default}]"
    text = " ".join(part for part in (description, default) if part)
    return click.option(flag, name, type=None if kind is bool else kind, default=None, help=text)


def _click_type(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Literal:
        return click.Choice(get_args(annotation))
    if origin in (Union, types.UnionType):
        return _click_type(next(kind for kind in get_args(annotation) if kind is not type(None)))
    return annotation if annotation in (int, float, bool, str, Path) else str


def merge_options(section: S, given: Mapping[str, Any]) -> S:
    """`section` with the options that were given on the command line (those that are not None).

    Raises:
        RecipeError: the values contradict each other; the message names the option.
    """
    values = section.model_dump()
    values.update({name: value for name, value in given.items() if value is not None and name in values})
    try:
        return type(section).model_validate(values)
    except ValidationError as e:
        raise RecipeError("\n".join(explain("command line", e, type(section)))) from e
