"""`spes-mega convert`: a checkpoint as one of another family, where that changes nothing that it computes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from spes_mega import __version__
from spes_mega.errors import CheckpointError, system_errors
from spes_mega.layout import FAMILIES, MOE_OF, Checkpoint, CheckpointWriter, expected_tensors, open_checkpoint
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.families.optional_parts import check_holds, optional_part, shared_expert_width, unused_parts
from spes_mega.layout.storage.rows import is_finite, row_slices
from spes_mega.layout.storage.safetensors_format import byte_count
from spes_mega.progress import byte_progress, sigterm_interrupts
from spes_mega.recipe import ModelSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True)
class Conversion:
    """What will be written.

    Attributes:
        dtypes: of each tensor of the result.
        added: tensors of zeros that do nothing.
        dropped: tensors of the source that do nothing.
        rounded: the dtype asked for may not hold every value as it is.
    """

    source: ModelSection
    model: ModelSection
    dtypes: dict[str, torch.dtype]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    rounded: bool

    @property
    def bytes_out(self) -> int:
        return sum(byte_count(self.dtypes[name], shape) for name, shape in expected_tensors(self.model).items())


def plan_conversion(source: Checkpoint, to: str | None = None, dtype: str = "source") -> Conversion:
    """Look at the source, and of its optional parts also at the values.

    Args:
        to: the family; None: the source's own.
        dtype: "source" keeps each tensor's.

    Raises:
        CheckpointError: the family cannot hold the model without a change; says why.
    """
    before = source.model
    to = to or before.family
    if FAMILIES[to].is_moe and not before.is_moe:
        raise CheckpointError(
            f"{source.source}: is dense ({before.family}), {to} a Mixture-of-Experts: spes-mega upcycle makes experts"
        )
    unused = unused_parts(before, source.read) if to != before.family else frozenset()
    check_holds(before, to, unused)
    model = ModelSection.model_validate(
        before.model_dump() | {"family": to, "shared_expert_hidden_size": shared_expert_width(before, to)}
    )
    names = expected_tensors(model)
    origins = {name: name if name in source.names else _neighbour(name) for name in names}
    dtypes = {name: DTYPES.get(dtype) or source.dtype(origin) for name, origin in origins.items()}
    return Conversion(
        before,
        model,
        dtypes,
        added=tuple(name for name in names if name not in source.names),
        dropped=tuple(name for name in source.names if name not in names),
        rounded=any(dtypes[name] not in (source.dtype(origins[name]), torch.float32) for name in names),
    )


def convert(
    source: Checkpoint, out: Path, plan: Conversion, advance: Callable[[int], None] = lambda count: None
) -> str | None:
    """Write `out` block by block: memory depends neither on the model nor on its largest tensor.

    Returns:
        What a user should know about the tokenizer of the result, if anything.

    Raises:
        CheckpointError: the source isn't finite or can't be read, or `out` can't be written. Nothing is left then.
    """
    folder = source.source if source.source.is_dir() else source.source.parent
    with CheckpointWriter(
        out,
        plan.model,
        lambda name: plan.dtypes[name],
        base_config=source.config,
        copy_from=folder,
        metadata={"spes_mega_version": __version__, "converted_from": plan.source.family},
        cached=False,
    ) as writer:
        for name, shape in expected_tensors(plan.model).items():
            for start, stop in row_slices(shape, budget=_BLOCK_BYTES):
                if name in plan.added:
                    rows = torch.zeros((stop - start, *shape[1:]), dtype=plan.dtypes[name])
                else:
                    rows = _finite_rows(source, name, start, stop)
                writer.write_rows(name, start, rows)
                advance(byte_count(plan.dtypes[name], tuple(rows.shape)))
    return writer.tokenizer_note


def _neighbour(name: str) -> str:
    """The tensor from which a tensor that the source lacks takes its dtype."""
    assert optional_part(name) is not None, f"{name}: only optional parts may be added"
    if name.endswith(".bias"):
        return name.removesuffix("bias") + "weight"
    return name.partition(".mlp.")[0] + ".self_attn.o_proj.weight"


def _finite_rows(source: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
    rows = source.read_rows(name, start, stop)
    if not is_finite(rows):
        raise CheckpointError(f"{source.source}: {name}: has NaN or infinite values; the source is damaged")
    return rows


@click.command("convert", context_settings={"show_default": False})
@click.argument("src", type=click.Path(path_type=Path, exists=True))
@click.option("--to", type=click.Choice(list(FAMILIES)), help="family of the result  [default: SRC's own]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the directory to make")
@click.option(
    "--config", type=click.Path(path_type=Path), help="config.json of SRC, where it is not beside the weights"
)
@click.option(
    "--dtype",
    type=click.Choice(["source", *DTYPES]),
    default="source",
    help="of the result  [default: source, unchanged]",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@system_errors(CheckpointError)
def command(src: Path, to: str | None, out: Path, config: Path | None, dtype: str, as_json: bool) -> None:
    """Write the checkpoint SRC as one of another family, dtype or format.

    SRC is a Hugging Face directory, a .safetensors file, a torch .pt/.bin/.ckpt file, or such a file with the state
    dict of a dense Megatron-Core model. A family that cannot hold the model exactly is refused, with the reason. From
    a dense model to a Mixture-of-Experts leads spes-mega upcycle.
    """
    with open_checkpoint(src, config) as source:
        plan = plan_conversion(source, to, dtype)
        started = time.monotonic()
        with sigterm_interrupts(), byte_progress("convert", plan.bytes_out) as advance:
            note = convert(source, out, plan, advance)
        notes = [line for line in (source.left_out_line(), note) if line]
    report = {
        "source": str(src),
        "out": str(out),
        "from": plan.source.family,
        "to": plan.model.family,
        "params": count_parameters(plan.model).total,
        "bytes": plan.bytes_out,
        "added": list(plan.added),
        "dropped": list(plan.dropped),
        "rounded": plan.rounded,
        "notes": notes,
        "seconds": round(time.monotonic() - started, 2),
    }
    click.echo(json.dumps(report) if as_json else "\n".join(_lines(report, plan)))


def _lines(report: dict[str, Any], plan: Conversion) -> list[str]:
    lines = [
        f"{report['from']} -> {report['to']}, {report['params']:,} parameters, {report['bytes']:,} bytes in "
        f"{report['out']}, written in {report['seconds']:g} s"
    ]
    if plan.added:
        lines.append(f"added {len(plan.added)} tensors of zeros that do nothing, such as {plan.added[0]}")
    if plan.dropped:
        lines.append(f"left out {len(plan.dropped)} tensors that do nothing, such as {plan.dropped[0]}")
    lines += report["notes"]
    lines.append("values were rounded to the new dtype" if plan.rounded else "no value was changed")
    following = "evaluate {} --data PREFIX" if plan.model.is_moe or plan.model.family not in MOE_OF else "upcycle {}"
    lines.append(f"next: spes-mega {following.format(report['out'])}")
    return lines
