"""How alike the experts of each layer are: cosine similarities, as the merging of experts compares them.

Axes: E experts of a layer, R rows of an expert matrix, C its columns.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout import Checkpoint, expert_name
from spes_mega.layout.storage.rows import row_slices
from spes_mega.outer.merging import SIMILARITY_MATRIX, add_to_gram, cosine_similarity, new_gram

_BLOCK_BYTES = 1 << 26


def expert_similarity(
    checkpoint: Checkpoint, advance: Callable[[int], None] = lambda layers: None
) -> dict[int, torch.Tensor]:
    """Pairwise cosine similarity of the experts' gate projections: MoE layer -> fp64 [E, E].

    Read in blocks of rows of all experts, so that memory depends neither on the model nor on the number of experts.
    """
    model, out = checkpoint.model, {}
    for layer in range(model.num_layers):
        if model.is_moe_layer(layer):
            out[layer] = _layer_similarity(checkpoint, layer)
            advance(1)
    return out


def _layer_similarity(checkpoint: Checkpoint, layer: int) -> torch.Tensor:
    names = [expert_name(layer, expert, SIMILARITY_MATRIX) for expert in range(checkpoint.model.num_experts)]
    gram = new_gram(len(names))
    for start, stop in row_slices(checkpoint.shape(names[0]), row_bytes_factor=2 * len(names), budget=_BLOCK_BYTES):
        add_to_gram(gram, torch.stack([checkpoint.read_rows(name, start, stop).double() for name in names]))
    return cosine_similarity(gram).clamp(-1, 1)


def off_diagonal(similarity_EE: torch.Tensor) -> torch.Tensor:
    """The similarities of different experts, each pair once."""
    first, second = torch.triu_indices(len(similarity_EE), len(similarity_EE), offset=1)
    return similarity_EE[first, second]


def plot_similarity(similarity: dict[int, torch.Tensor], title: str, out: Path) -> None:
    """Draw a heatmap for each layer, all on one colour scale, as an image file.

    Raises:
        CheckpointError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise CheckpointError("--plot needs matplotlib: pip install 'spes-mega[plot]'") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = math.ceil(math.sqrt(len(similarity)))
    rows = math.ceil(len(similarity) / columns)
    lowest = min(0.0, *(float(matrix.min()) for matrix in similarity.values()), 0.0)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(1.5 * columns + 2, 1.6 * rows + 1), dpi=120, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(similarity) :]:
        axes.set_visible(False)
    for axes, (layer, matrix) in zip(grid.flat, similarity.items(), strict=False):
        image = axes.imshow(matrix.numpy(), vmin=lowest, vmax=1, cmap="viridis")
        axes.set_title(f"layer {layer}", fontsize=8)
        axes.tick_params(labelsize=6)
    figure.colorbar(image, ax=grid, shrink=0.8, label="cosine similarity of experts")
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as e:  # ValueError: an ending that matplotlib does not know
        raise CheckpointError(f"{out}: cannot write the plot: {e}") from e
    finally:
        pyplot.close(figure)
