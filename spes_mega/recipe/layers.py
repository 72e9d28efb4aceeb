"""Laying mappings over each other: overlays, and single fields as `--set` gives them."""

from typing import Any

from spes_mega.errors import RecipeError
from spes_mega.recipe.strict_yaml import MAX_DEPTH, YamlError, parse_yaml
from spes_mega.validation import Key, shortened


def parse_override(override: str) -> dict[str, Any]:
    """`section.field=value` as the mapping that it stands for."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise RecipeError(f"--set {shortened(override)}: expected section.field=value")
    if key.count(".") >= MAX_DEPTH:
        raise RecipeError(f"--set {shortened(override)}: nested over {MAX_DEPTH} deep")
    try:
        value = parse_yaml(text)
    except YamlError as e:
        raise RecipeError(e.located(f"--set {shortened(override)}", single="\n" not in text)) from e
    path = _Inner()
    *sections, field = key.split(".")
    path[field] = value
    for section in reversed(sections):
        path = _Inner({section: path})
    return path


def overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged at every depth; everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict):
            merged[key] = overlaid(inner if isinstance(inner, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def set_value(below: dict[str, Any], path: dict[str, Any]) -> dict[str, Any]:
    """`below` with the value at the end of `path`, nested mappings of one key each; the value takes the place whole."""
    ((key, value),) = path.items()
    inner = below.get(key)
    if isinstance(value, _Inner):
        value = set_value(inner if isinstance(inner, dict) else {}, value)
    return below | {key: value}


class _Inner(dict[str, Any]):
    """A mapping on the way to a value that is set, as opposed to a mapping that is the value."""


def origin(layers: list[tuple[str, dict[str, Any]]], key: Key) -> str:
    """The last layer that says what `key` is; the recipe for what nobody says."""
    return next((source for source, layer in reversed(layers) if _says(layer, key)), layers[0][0])


def _says(layer: Any, key: Key) -> bool:
    """Whether `key` or what it is in has its value from this layer, as opposed to some of its neighbours."""
    whole = False
    for part in key:
        if not isinstance(layer, dict):
            return True
        if part not in layer:
            return whole
        inner = layer[part]
        whole = whole or (isinstance(layer, _Inner) and not isinstance(inner, _Inner))
        layer = inner
    return True
