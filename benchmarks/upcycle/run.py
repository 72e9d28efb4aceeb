"""How fast `spes-mega upcycle` is, and how much memory it takes, beside dd, torch.randn and transformers."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from dense_source import SIZES, dense_model, make_source
from measure import dd_seconds, randn_seconds, run_python

from spes_mega.recipe import UpcycleSection

_READ_BYTES = 16 << 20
# What any program holds that makes use of torch, which differs between its builds.
_TORCH_AT_WORK = "import torch; (torch.randn(9, 9).bfloat16() @ torch.randn(9, 9).bfloat16()).float().sum().item()"


@click.command()
@click.option("--size", type=click.Choice(SIZES), default="small", show_default=True)
@click.option("--method", type=click.Choice(["copy", "noise"]), default="copy", show_default=True)
@click.option("--shards", default=2, show_default=True, help="files of the source")
@click.option("--experts", default=8, show_default=True)
@click.option("--cold", is_flag=True, help="drop the source from the page cache before; otherwise it is read into it")
@click.option("--compare", is_flag=True, help="do it by transformers, too, with as much memory as that takes")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/benchmark-upcycle"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def main(
    size: str, method: str, shards: int, experts: int, cold: bool, compare: bool, folder: Path, as_json: bool
) -> None:
    """Upcycle a random dense model and print what it took. The source stays in FOLDER for the next run.

    dd writes as many bytes to the same disk just before and just after; dd_s is the mean of the two.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, out = make_source(folder, size, shards), folder / "moe"
    command = ["-m", "spes_mega.cli", "upcycle", source, "--out", out, "--method", method, "--num-experts", experts]
    planned = json.loads(run_python(*command, "--dry-run", "--json").stdout)["bytes"]
    before = dd_seconds(folder, planned)
    _prepare(source, cold)
    with _scratch(out):
        ours = run_python(*command)
        written = sum(file.stat().st_size for file in out.iterdir())
    after = dd_seconds(folder, planned)
    numbers = _normal_numbers(size, experts) if method == "noise" else 0
    figures: dict[str, Any] = {
        "wall_s": ours.wall_s,
        "dd_s": (before + after) / 2,
        "randn_s": randn_seconds(numbers),
        "peak_rss_bytes": ours.peak_rss_bytes,
        "torch_rss_bytes": run_python("-c", _TORCH_AT_WORK).peak_rss_bytes,
        "bytes_out": written,
        "cpu_s": ours.cpu_s,
        "dd_before_s": before,
        "dd_after_s": after,
        "randn_numbers": numbers,
    }
    figures["wall_ratio"] = ours.wall_s / max(figures["dd_s"], figures["randn_s"])
    if compare:
        _prepare(source, cold)
        with _scratch(out):
            theirs = run_python(Path(__file__).with_name("with_transformers.py"), source, out, experts, method)
        figures |= {
            "transformers_wall_s": theirs.wall_s,
            "transformers_peak_rss_bytes": theirs.peak_rss_bytes,
            "transformers_steps_s": json.loads(theirs.stdout.splitlines()[-1]),
            "transformers_wall_ratio": theirs.wall_s / ours.wall_s,
            "transformers_peak_rss_ratio": theirs.peak_rss_bytes / ours.peak_rss_bytes,
        }
    figures = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


def _normal_numbers(size: str, experts: int) -> int:
    """How many entries of the experts get noise."""
    model = dense_model(size)
    assert model.ffn_hidden_size is not None, "it is dense"
    entries = model.num_layers * 3 * model.hidden_size * model.ffn_hidden_size * experts
    return round(UpcycleSection().noise_fraction * entries)


def _prepare(source: Path, cold: bool) -> None:
    """The source in the page cache, or not; and nothing left to be written."""
    os.sync()
    for file in source.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            if cold:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while stream.read(_READ_BYTES):
                    pass


@contextmanager
def _scratch(out: Path) -> Iterator[None]:
    """`out` is removed before and after."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()


if __name__ == "__main__":
    main()
