"""The state that a run starts from: a checkpoint, or random weights."""

from pathlib import Path

from spes_mega.errors import CheckpointError
from spes_mega.hub.state.ledger import Ledger
from spes_mega.hub.state.store import Store, Template
from spes_mega.layout.families.config_json import differences
from spes_mega.layout.initialize import initial_tensor
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.reader import Checkpoint, open_checkpoint
from spes_mega.layout.storage.rows import is_finite, row_slices
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.recipe import Recipe


def commit_initial(store: Store, recipe: Recipe, init: Path | None) -> None:
    """Commit round 0 from the checkpoint `init`, or from weights drawn with `train.seed` if it is None.

    Raises:
        CheckpointError: the checkpoint is not of the shape that the recipe asks for (the fields are named), or has
            values that are not finite.
    """
    if init is None:
        with store.committing(0, Template()) as draft:
            _draw(draft.writer, recipe)
            draft.complete(Ledger.empty(recipe.spes.num_nodes))
        return
    with open_checkpoint(init) as checkpoint:
        if lines := differences(recipe.model, checkpoint.model):
            raise CheckpointError(f"{init} is not the model of this recipe: " + "; ".join(lines))
        template = Template(checkpoint.config, init if init.is_dir() else None)
        with store.committing(0, template) as draft:
            _copy(draft.writer, checkpoint)
            draft.complete(Ledger.empty(recipe.spes.num_nodes))


def _draw(writer: CheckpointWriter, recipe: Recipe) -> None:
    for name, shape in expected_tensors(recipe.model).items():
        writer.write(name, initial_tensor(recipe.model, name, shape, recipe.train.seed))


def _copy(writer: CheckpointWriter, checkpoint: Checkpoint) -> None:
    for name in checkpoint.names:
        for start, stop in row_slices(checkpoint.shape(name)):
            rows = checkpoint.read_rows(name, start, stop).float()
            if not is_finite(rows):
                raise CheckpointError(f"{checkpoint.source}: {name} has NaN or infinite values")
            writer.write_rows(name, start, rows)
