"""`spes-mega recipe`: every field of a recipe with its meaning, as YAML that can be edited."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spes_mega.recipe import Recipe, is_local, load_recipe

COMMENT_COLUMN = 34
WIDTH = 110


def explain_recipe(recipe: Recipe | None) -> str:
    """A complete recipe as commented YAML: the values of `recipe`, or the defaults, with `...` where there is none."""
    lines = ["# Fields marked (local) may differ from node to node; hub and nodes must agree on all others."]
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        value = getattr(recipe, name) if recipe is not None else None
        if _is_section(section):
            lines += ["", f"{name}:  # {_first_line(section)}"]
            lines += _fields(section, value, indent="  ")
        else:
            lines += ["", *_line(name, field, value if recipe is not None else field.default, indent="")]
    return "\n".join(lines) + "\n"


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _fields(section: type[BaseModel], values: BaseModel | None, indent: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        value = getattr(values, name) if values is not None else field.default
        if _is_section(field.annotation):
            yield f"{indent}{name}:  # {_first_line(field.annotation)}"
            yield from _fields(field.annotation, value, indent + "  ")
        else:
            yield from _line(name, field, value, indent)


def _line(name: str, field: FieldInfo, value: Any, indent: str) -> list[str]:
    start = f"{indent}{name}: {_yaml(value, field)}"
    comment = " ".join(part for part in ("(local)" if is_local(field) else "", field.description or "") if part)
    if not comment:
        return [start]
    first, *rest = textwrap.wrap(comment, WIDTH - COMMENT_COLUMN)
    more = [" " * COMMENT_COLUMN + "# " + text for text in rest]
    return [f"{start:<{COMMENT_COLUMN - 1}} # {first}", *more]


def _yaml(value: Any, field: FieldInfo) -> str:
    if value is field.default and field.is_required():
        return "..."
    plain = str(value) if isinstance(value, Path) else _lists(value)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).strip().removesuffix("\n...")


def _lists(value: Any) -> Any:
    return [_lists(part) for part in value] if isinstance(value, tuple) else value


@click.command(name="recipe")
@click.argument("recipe", type=click.Path(path_type=Path), required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override section.field of RECIPE")
def command(recipe: Path | None, overrides: tuple[str | Path, ...]) -> None:
    """Print every field of a recipe with its meaning, as YAML.

    With RECIPE, its checked values; without, the defaults, and ... for fields that have none.
    """
    if recipe is None and overrides:
        raise click.UsageError("--set and --overlay change a RECIPE: name one")
    click.echo(explain_recipe(load_recipe(recipe, overrides) if recipe is not None else None), nl=False)
