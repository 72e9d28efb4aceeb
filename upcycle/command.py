"""`spes-mega upcycle`: a dense checkpoint becomes a Mixture-of-Experts."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from spes_mega.errors import RecipeError
from spes_mega.layout import differences, open_checkpoint
from spes_mega.options import merge_options, recipe_options
from spes_mega.recipe import UpcycleSection, load_recipe
from upcycle.pipeline import upcycle
from upcycle.plan import Plan, make_plan
from upcycle.progress import byte_progress
from upcycle.verify import Verification, check_available, verify

_PATH = click.Path(path_type=Path)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(context_settings={"show_default": False})
@click.argument("src", type=click.Path(path_type=Path, exists=True))
@click.option("--config", type=_FILE, help="config.json of SRC, where it is not beside the weights")
@click.option("--out", type=_PATH, help="the directory to make [default: SRC's name + '-moe', in the current folder]")
@click.option("--recipe", type=_FILE, help="take the settings from this recipe; its model must fit the result")
@recipe_options(UpcycleSection)
@click.option("--dry-run", is_flag=True, help="only say what would be made")
@click.option("--verify", "verifying", is_flag=True, help="compare the logits of SRC and result, with transformers")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(
    src: Path,
    config: Path | None,
    out: Path | None,
    recipe: Path | None,
    dry_run: bool,
    verifying: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Turn the dense checkpoint SRC into a Mixture-of-Experts.

    SRC is a Hugging Face directory, a .safetensors file, or a torch .pt/.bin/.ckpt file. Every layer's
    feed-forward part is copied into each of the new layer's experts. The result is a Hugging Face directory
    that transformers opens, with a starting recipe for training it.
    """
    base = load_recipe(recipe) if recipe else None
    settings = merge_options(base.upcycle if base else UpcycleSection(), given)
    out = out or Path(
        re.sub(r"\.\w+$", "", src.resolve().name) + "-moe" if src.is_file() else src.resolve().name + "-moe"
    )
    if verifying and not dry_run:
        check_available()
    with open_checkpoint(src, config) as source:
        plan = make_plan(source, settings)
        if base and (wrong := differences(base.model, plan.model)):
            raise RecipeError(f"{recipe}: its model does not fit the result: {'; '.join(wrong)}")
        report = {"source": str(src), "out": str(out), "dry_run": dry_run, **plan.summary()}
        if dry_run:
            report["tensors"] = plan.tensors()
        else:
            started = time.monotonic()
            with _sigterm_interrupts(), byte_progress("upcycle", plan.bytes_out) as advance:
                upcycle(source, out, plan, advance)
            report["seconds"] = round(time.monotonic() - started, 2)
    found = verify(src, config, out, plan) if verifying and not dry_run else None
    if found:
        report |= {"max_logit_difference": found.max_difference, "should_be_equal": found.exact}
    click.echo(json.dumps(report) if as_json else "\n".join(_lines(report, plan, found)))


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that the temporary directory is removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _lines(report: dict[str, Any], plan: Plan, found: Verification | None) -> Iterator[str]:
    if "tensors" in report:
        yield from _tensor_table(report["tensors"])
    yield (
        f"{plan.source.family}, {report['params_source']:,} parameters -> {plan.model.family}, "
        f"{report['params_total']:,} ({report['params_active']:,} active per token), "
        f"{plan.model.num_experts} experts a layer, top-{plan.model.top_k}"
    )
    yield f"{report['bytes']:,} bytes ({', '.join(report['dtypes'])}) in {report['out']}" + (
        ": not written (--dry-run)" if report["dry_run"] else f", written in {report['seconds']:g} s"
    )
    if found:
        meaning = "should be equal, and are" if found.exact else "noise or rounding: not expected to be equal"
        yield f"largest difference of logits on {found.tokens} random tokens: {found.max_difference:.3g} ({meaning})"


def _tensor_table(tensors: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each kind of tensor, with layer and expert numbers replaced by *."""
    counts: dict[tuple[str, str, str], int] = {}
    for tensor in tensors:
        key = (re.sub(r"\.\d+\.", ".*.", tensor["name"]), str(tensor["shape"]), tensor["dtype"])
        counts[key] = counts.get(key, 0) + 1
    for (name, shape, dtype), count in counts.items():
        yield f"  {count:6d} x {name}  {shape} {dtype}"
