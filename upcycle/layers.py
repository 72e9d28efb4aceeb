"""Which layers get experts: what `moe_layers` means for a model of so many layers."""

from spes_mega.errors import RecipeError


def moe_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Numbers of the layers that `text` (all, odd, even, 1-27, 3,5,7) names. Raises RecipeError: one does not exist."""
    named = {"all": range(num_layers), "odd": range(1, num_layers, 2), "even": range(0, num_layers, 2)}
    if text in named:
        layers = set(named[text])
    else:
        layers = {layer for part in text.split(",") for layer in _range(part)}
        if max(layers, default=0) >= num_layers:
            raise RecipeError(
                f"moe_layers {text}: there is no layer {max(layers)}: the model's layers are 0 to {num_layers - 1}"
            )
    if not layers:
        raise RecipeError(f"moe_layers {text}: names no layer of a model of {num_layers} layers")
    return tuple(sorted(layers))


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
