"""Upcycle a checkpoint tensor by tensor: memory holds one dense matrix and what is made from it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from spes_mega import __version__
from spes_mega.errors import CheckpointError
from spes_mega.layout import (
    EXPERT_MATRICES,
    Checkpoint,
    CheckpointWriter,
    dense_name,
    expected_tensors,
    expert_name,
    router_name,
)
from spes_mega.layout.optional_parts import optional_part
from spes_mega.layout.safetensors_format import byte_count
from spes_mega.recipe import Recipe, TrainSection, UpcycleSection
from upcycle.methods import METHODS
from upcycle.plan import Plan
from upcycle.router import router

_RECIPE_HEADER = """\
# A starting recipe for this model: add data, the number of nodes and training settings, then
#   spes-mega hub recipe.yaml --init THIS_FOLDER --state STATE --listen HOST:PORT
"""


def upcycle(source: Checkpoint, out: Path, plan: Plan, advance: Callable[[int], None] = lambda count: None) -> None:
    """Write the Mixture-of-Experts that `plan` describes as the new directory `out`.

    Args:
        advance: called with the number of bytes just written.

    Raises:
        CheckpointError: the source can't be read or isn't finite, or `out` can't be written. Nothing is left then.
    """
    folder = source.source if source.source.is_dir() else source.source.parent
    with CheckpointWriter(
        out,
        plan.model,
        lambda name: plan.dtypes[name],
        base_config=source.config,
        copy_from=folder,
        metadata={"spes_mega_version": __version__, "upcycle": json.dumps(plan.settings.model_dump())},
    ) as writer:
        steps = _Steps(source, writer, plan.settings, advance)
        dense = {dense_name(layer, m): (layer, m) for layer in range(plan.source.num_layers) for m in EXPERT_MATRICES}
        for name in source.names:
            if name in dense:
                steps.make_experts(name, *dense[name])
            else:
                steps.carry_over(name)
        for layer in range(plan.model.num_layers):
            steps.make_router(layer)
        for name in expected_tensors(plan.model):
            if optional_part(name) is not None and name not in source.names:
                steps.leave_unused(name)
        writer.write_text("upcycle.json", _provenance(source, plan))
        writer.write_text("recipe.yaml", starting_recipe(plan))


class _Steps:
    """The three things that are done to tensors."""

    def __init__(
        self, source: Checkpoint, writer: CheckpointWriter, settings: UpcycleSection, advance: Callable[[int], None]
    ) -> None:
        self._source = source
        self._writer = writer
        self._settings = settings
        self._advance = advance

    def carry_over(self, name: str) -> None:
        self._write(name, self._read(name))

    def make_experts(self, dense: str, layer: int, matrix: str) -> None:
        tensor = self._read(dense)
        for expert in range(self._settings.num_experts):
            name = expert_name(layer, expert, matrix)
            self._write(name, METHODS[self._settings.method](tensor, name, self._settings))

    def leave_unused(self, name: str) -> None:
        self._write(name, torch.zeros(self._writer.shape(name)))

    def make_router(self, layer: int) -> None:
        name = router_name(layer)
        shape = (self._settings.num_experts, self._source.model.hidden_size)
        tensor = router(self._settings, name, shape, lambda: self._source.read(dense_name(layer, "down_proj")))
        self._write(name, tensor)

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self._source.source}: {name}: has NaN or infinite values; the source is damaged")
        return tensor

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        self._writer.write(name, tensor)
        self._advance(byte_count(self._writer.dtype(name), tuple(tensor.shape)))


def _provenance(source: Checkpoint, plan: Plan) -> str:
    facts = {
        "tool": "spes-mega upcycle",
        "version": __version__,
        "source": {"path": str(source.source), "model": plan.source.model_dump(mode="json", exclude_defaults=True)},
        "settings": plan.settings.model_dump(),
        "result": plan.summary(),
    }
    return json.dumps(facts, indent=2) + "\n"


def starting_recipe(plan: Plan) -> str:
    """The text of a recipe for the result: its model, how it was made, and defaults for all the rest."""
    raw = {
        "model": plan.model.model_dump(mode="json", exclude_defaults=True),
        "upcycle": plan.settings.model_dump(mode="json"),
    }
    if plan.model.max_seq_len < TrainSection().seq_len:
        raw["train"] = {"seq_len": plan.model.max_seq_len}
    Recipe.model_validate(raw)
    return _RECIPE_HEADER + yaml.safe_dump(raw, sort_keys=False)
