"""Reading recipes: YAML files, with overlays and single fields laid over them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spes_mega.errors import RecipeError, system_errors
from spes_mega.files.text import read_text
from spes_mega.recipe.layers import origin, overlaid, parse_override, set_value
from spes_mega.recipe.schema import Recipe
from spes_mega.recipe.strict_yaml import YamlError, parse_yaml
from spes_mega.validation import Source, explain

MAX_BYTES = 4 << 20
"""Of a recipe, which is read in some seconds then."""


@system_errors(RecipeError)
def load_recipe(path: Path | str, overrides: Iterable[str | Path] = ()) -> Recipe:
    """Read a recipe file and lay `overrides` over it, in this order.

    A `Path` is an overlay, a YAML file with some of a recipe's keys; a text is `section.field=value` (a YAML value).
    Relative paths to data start at the folder of the file that has them.

    Raises:
        RecipeError: a file cannot be read, or a key or value is wrong; the message names file (or override) and key.
    """
    raw = _read(Path(path), "recipe")
    layers = [(str(path), raw)]
    for override in overrides:
        if isinstance(override, Path):
            layers.append((str(override), _read(override, "overlay")))
            raw = overlaid(raw, layers[-1][1])
        else:
            layers.append((f"--set {override}", parse_override(override)))
            raw = set_value(raw, layers[-1][1])
    return parse_recipe(raw, source=lambda key: origin(layers, key), base=Path(path).resolve().parent)


def override_recipe(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """`recipe` with `section.field=value` laid over it. Raises RecipeError: a key or value is wrong."""
    raw = recipe.model_dump(mode="json")
    for override in overrides:
        raw = set_value(raw, parse_override(override))
    return parse_recipe(raw, source=recipe.name, base=Path())


def parse_recipe(raw: dict[str, Any], *, source: Source, base: Path) -> Recipe:
    """Check a raw mapping; relative data paths are taken from `base`. Raises RecipeError naming `source`."""
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise RecipeError("\n".join(explain(source, e, Recipe))) from e
    if recipe.data.train is not None:
        train = _without_tilde(recipe.data.train, source if isinstance(source, str) else source(("data", "train")))
        data = recipe.data.model_copy(update={"train": base / train})
        recipe = recipe.model_copy(update={"data": data})
    return recipe


def _without_tilde(train: Path, source: str) -> Path:
    try:
        return train.expanduser()
    except RuntimeError as e:
        raise RecipeError(f"{source}: data.train: {train}: no such user, or one without a home directory") from e


def _read(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file, with its path to data made absolute if it is an overlay's."""
    text = read_text(path, RecipeError, what, MAX_BYTES)
    try:
        raw = parse_yaml(text)
    except YamlError as e:
        raise RecipeError(e.located(str(path))) from e
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a recipe is a mapping with sections such as model, spes, train")
    data = raw.get("data")
    if what == "overlay" and isinstance(data, dict) and isinstance(data.get("train"), str):
        data["train"] = str(path.resolve().parent / _without_tilde(Path(data["train"]), str(path)))
    return raw
