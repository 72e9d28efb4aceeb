"""`spes-mega upcycle`: a dense checkpoint becomes a Mixture-of-Experts."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spes_mega.errors import CheckpointError, RecipeError, system_errors
from spes_mega.layout import CheckpointWriter, differences
from spes_mega.options import merge_options, recipe_options
from spes_mega.progress import byte_progress, count_progress, sigterm_interrupts
from spes_mega.recipe import UpcycleSection, load_recipe
from upcycle.pipeline import upcycle
from upcycle.plan import Plan, make_plan
from upcycle.router.calibration import Calibration, calibrate
from upcycle.sources import Sources, open_sources
from upcycle.verify.side_by_side import Verification, check_can_verify, verify

_PATH = click.Path(path_type=Path)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(context_settings={"show_default": False})
@click.argument("src", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--config", type=_FILE, help="config.json of SRC, where it is not beside the weights")
@click.option("--out", type=_PATH, help="the directory to make [default: SRC's name + '-moe', in the current folder]")
@click.option("--recipe", type=_FILE, help="take the settings from this recipe; its model must fit the result")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override section.field of --recipe")
@recipe_options(UpcycleSection)
@click.option("--calibration", type=_PATH, help="kmeans router: the text, as the prefix of an indexed dataset")
@click.option("--dry-run", is_flag=True, help="only say what would be made")
@click.option("--verify", "verifying", is_flag=True, help="then run SRC and result side by side, layer by layer")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@system_errors(CheckpointError)
def command(
    src: tuple[Path, ...],
    config: Path | None,
    out: Path | None,
    recipe: Path | None,
    overrides: tuple[str | Path, ...],
    calibration: Path | None,
    dry_run: bool,
    verifying: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Turn the dense language model SRC into a Mixture-of-Experts (MoE).

    In an MoE, a layer's feed-forward network (FFN) is replaced by several, the experts, and a router that sends each
    token to the --top-k experts it finds best: many weights, of which each token uses few. All but the FFNs is taken
    over as it is. The result is a Hugging Face directory that transformers opens, with a recipe to train it further
    and upcycle.json, which says how it was made.

    SRC is a Hugging Face directory, a .safetensors file, or a torch .pt/.bin/.ckpt file; with --method mix there are
    several, of one shape.

    \b
    Ways to make experts (--method), and whether the result computes what SRC does before it is trained:
      copy       N copies of the FFN                                 exactly the same
      noise      copies with random noise                            no: more noise, more difference
      drop       copies, a part of each drawn anew                   no
      split      copies, each cut into smaller experts               exactly the same
      partition  one FFN divided among experts; the model's size     only if all experts are used
                 stays, a token uses less of it
      mix        each expert from another fine-tuned SRC             no: it is an average of the SRCs

    \b
    Examples:
      spes-mega upcycle Qwen3-1.7B --method copy --num-experts 8 --verify
      spes-mega upcycle Qwen3-1.7B --method split --granularity 4 --router-init normal
      spes-mega upcycle math code law news --method mix --num-experts 8 --router-init kmeans --calibration data/text
    """
    if overrides and not recipe:
        raise click.UsageError("--set and --overlay change a recipe: give --recipe")
    base = load_recipe(recipe, overrides) if recipe else None
    settings = merge_options(base.upcycle if base else UpcycleSection(), given)
    _check_calibration(settings, calibration)
    out = out or _default_out(src[0])
    with open_sources(src, config) as sources:
        plan = make_plan(sources, settings)
        if base and (wrong := differences(base.model, plan.model)):
            raise RecipeError(f"{recipe}: its model does not fit the result: {'; '.join(wrong)}")
        if verifying:
            check_can_verify(plan)
        report = {"source": [str(path) for path in src], "out": str(out), "dry_run": dry_run, **plan.summary()}
        notes = [line for line in (source.left_out_line() for source in sources.all) if line]
        report["notes"] = notes
        found = None
        if dry_run:
            report["tensors"] = plan.tensors()
        else:
            report["seconds"], note = _make(sources, out, plan, calibration)
            notes += [note] if note else []
            found = _verified(sources, out, plan) if verifying else None
    if found:
        report["verification"] = asdict(found) | {"max_difference": found.max_difference}
    click.echo(json.dumps(report) if as_json else "\n".join(_lines(report, plan, found)))


def _check_calibration(settings: UpcycleSection, calibration: Path | None) -> None:
    if settings.router_init == "kmeans" and calibration is None:
        raise RecipeError("router_init kmeans needs a text: --calibration PREFIX (`spes-mega tokenize` makes one)")
    if settings.router_init != "kmeans" and calibration is not None:
        raise RecipeError(f"--calibration is for router_init kmeans, not for {settings.router_init}")


def _default_out(src: Path) -> Path:
    name = src.resolve().name
    return Path((re.sub(r"\.\w+$", "", name) if src.is_file() else name) + "-moe")


def _make(sources: Sources, out: Path, plan: Plan, calibration: Path | None) -> tuple[float, str | None]:
    """Returns the seconds that it took, and what `upcycle` says."""
    started = time.monotonic()
    CheckpointWriter(out, plan.model, plan.dtypes.__getitem__)  # says at once whether `out` is taken or has no room
    with sigterm_interrupts():
        calibrated = _calibrated(sources, plan, calibration) if calibration else None
        with byte_progress("upcycle", plan.bytes_out) as advance:
            note = upcycle(sources, out, plan, calibrated, advance)
    return round(time.monotonic() - started, 2), note


def _calibrated(sources: Sources, plan: Plan, prefix: Path) -> Calibration:
    with count_progress("calibrate", plan.source.num_layers, "layers") as advance:
        return calibrate(sources, plan, prefix, advance)


def _verified(sources: Sources, out: Path, plan: Plan) -> Verification:
    with count_progress("verify", plan.model.num_layers, "layers") as advance:
        return verify(sources, out, plan, advance)


def _lines(report: dict[str, Any], plan: Plan, found: Verification | None) -> Iterator[str]:
    if "tensors" in report:
        yield from _tensor_table(report["tensors"])
    yield (
        f"{plan.source.family}, {report['params_source']:,} parameters -> {plan.model.family}, "
        f"{report['params_total']:,} ({report['params_active']:,} active per token), "
        f"{plan.model.num_experts} experts a layer, top-{plan.model.top_k}"
    )
    reason = plan.difference()
    yield f"computes what its source does: {'no: ' + reason if reason else 'yes'}"
    yield f"{report['bytes']:,} bytes ({', '.join(report['dtypes'])}) in {report['out']}" + (
        ": not written (--dry-run)" if report["dry_run"] else f", written in {report['seconds']:g} s"
    )
    yield from report["notes"]
    if found:
        yield from _difference_table(found)


def _difference_table(found: Verification) -> Iterator[str]:
    yield f"verified: {found.equal_tensors} tensors are those of the source, bit for bit; largest differences by layer,"
    yield "as a share of the largest value (output: of the layers; experts: of each expert from the FFN it is made of):"
    yield "  layer            output   experts"
    for layer in found.layers:
        experts = "" if layer.experts is None else f"{layer.experts:10.2g}"
        yield f"  {layer.layer:5d}  {layer.kind:7s}  {layer.output:7.2g}{experts}"
    if found.difference:
        yield f"largest: {found.max_difference:.3g} (not expected to be equal: {found.difference})"
    else:
        yield f"largest: {found.max_difference:.3g} (equal: rounding explains up to {found.allowed:.3g})"


def _tensor_table(tensors: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each kind of tensor, with layer and expert numbers replaced by *."""
    counts: dict[tuple[str, str, str], int] = {}
    for tensor in tensors:
        key = (re.sub(r"\.\d+\.", ".*.", tensor["name"]), str(tensor["shape"]), tensor["dtype"])
        counts[key] = counts.get(key, 0) + 1
    for (name, shape, dtype), count in counts.items():
        yield f"  {count:6d} x {name}  {shape} {dtype}"
