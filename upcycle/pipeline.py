"""Upcycle a checkpoint tensor by tensor: memory holds a few dense matrices and what is made from them.

Each source tensor is one job of a worker, which reads, checks and hashes it once and writes all that becomes of it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from spes_mega.layout import EXPERT_MATRICES, CheckpointWriter, ExpertKey, dense_name, expected_tensors, router_name
from spes_mega.layout.families.optional_parts import optional_part
from spes_mega.layout.names import expert_name
from spes_mega.layout.storage.safetensors_format import byte_count
from upcycle.digest import PLACEHOLDER
from upcycle.methods import Shared
from upcycle.plan import Plan
from upcycle.provenance import metadata, provenance, starting_recipe
from upcycle.router.calibration import Calibration
from upcycle.router.matrix import router
from upcycle.sources import Sources
from upcycle.workers import Workers

Advance = Callable[[int], None]


def upcycle(
    sources: Sources,
    out: Path,
    plan: Plan,
    calibration: Calibration | None = None,
    advance: Advance = lambda count: None,
) -> str | None:
    """Write the Mixture-of-Experts that `plan` describes as the new directory `out`.

    Args:
        calibration: for router_init kmeans, what `calibrate` found.
        advance: called with the number of bytes just written.

    Returns:
        What a user should know about the tokenizer of the result, if anything.

    Raises:
        CheckpointError: a source can't be read or isn't finite, or `out` can't be written. Nothing is left then.
    """
    with CheckpointWriter(
        out,
        plan.model,
        lambda name: plan.dtypes[name],
        base_config=sources.config,
        copy_from=sources.folder,
        metadata=metadata(plan, [PLACEHOLDER] * len(sources.all)),
        cached=False,
    ) as writer:
        with Workers(advance) as workers:
            steps = _Steps(sources, writer, plan, calibration, workers)
            experts = {dense_name(layer, matrix) for layer in plan.moe_layers for matrix in EXPERT_MATRICES}
            for name in sources.names:
                if name not in experts:
                    steps.carry_over(name)
            for layer in plan.moe_layers:
                steps.make_experts(layer)
                steps.make_router(layer)
            for name in expected_tensors(plan.model):
                if optional_part(name) is not None and name not in sources.names:
                    steps.leave_unused(name)
        digests = sources.digests()
        writer.set_metadata(metadata(plan, digests))
        writer.write_text("upcycle.json", provenance(sources, plan, digests, calibration))
        writer.write_text("recipe.yaml", starting_recipe(plan))
    return writer.tokenizer_note


class _Steps:
    """The things that are done to tensors. Each hands jobs to the workers, which read what they need themselves."""

    def __init__(
        self,
        sources: Sources,
        writer: CheckpointWriter,
        plan: Plan,
        calibration: Calibration | None,
        workers: Workers,
    ) -> None:
        self._sources = sources
        self._writer = writer
        self._plan = plan
        self._calibration = calibration
        self._workers = workers

    def carry_over(self, name: str) -> None:
        self._workers.submit(lambda: self._write(name, self._sources.pieces(name, digest=True)))

    def make_experts(self, layer: int) -> None:
        shared = self._plan.method.prepare(layer, self._sources.read, self._plan.settings)
        for matrix in EXPERT_MATRICES:
            for source in range(len(self._sources.all)):
                self._workers.submit(partial(self._make_matrices, layer, matrix, source, shared))

    def _make_matrices(self, layer: int, matrix: str, source: int, shared: Shared) -> int:
        """One matrix of all experts that come from one source's matrix, which is read once."""
        dense = self._sources.read_one(source, dense_name(layer, matrix), digest=True)
        dense = dense.to(torch.promote_types(dense.dtype, self._writer.dtype(expert_name(layer, 0, matrix))))
        count, written = self._plan.experts_per_source, 0
        for expert in range(source * count, (source + 1) * count):
            key = ExpertKey(layer, expert, matrix)
            rows = self._plan.method.make_rows(dense, key, self._plan.settings, shared)
            written += self._write(expert_name(*key), rows)
        return written

    def make_router(self, layer: int) -> None:
        name = router_name(layer)
        rows = router(
            self._plan.settings,
            name,
            self._writer.shape(name),
            self._plan.method.router_repeats(self._plan.settings),
            lambda: self._sources.read(dense_name(layer, "down_proj")),
            self._calibration.routers[layer] if self._calibration else None,
        )
        self._workers.submit(lambda: self._write(name, [(0, rows)]))

    def leave_unused(self, name: str) -> None:
        self._workers.submit(lambda: self._write(name, [(0, torch.zeros(self._writer.shape(name)))]))

    def _write(self, name: str, parts: Iterable[tuple[int, torch.Tensor]]) -> int:
        """Returns the number of bytes written."""
        written = 0
        for start, rows in parts:
            self._writer.write_rows(name, start, rows)
            written += byte_count(self._writer.dtype(name), tuple(rows.shape))
        return written
