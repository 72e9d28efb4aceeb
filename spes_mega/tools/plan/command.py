"""`spes-mega plan`: what a recipe needs, and whether the machines at hand have it."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import click

from spes_mega.tools.plan.units import BitsPerSecond, Bytes


@click.command("plan")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(1), help="machines that train  [default: the recipe's spes.num_nodes]")
@click.option("--gpus-per-node", "gpus", type=click.IntRange(1), default=1, show_default=True, help="of every node")
@click.option("--gpu-memory", type=Bytes(), default="48GiB", show_default=True, help="of one GPU")
@click.option("--bandwidth", type=BitsPerSecond(), default="1Gbps", show_default=True, help="of a node, each way")
@click.option("--hub-bandwidth", type=BitsPerSecond(), help="of the hub, each way  [default: as --bandwidth]")
@click.option(
    "--tflops",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    help="sustained by one GPU in training, in 10^12 operations a second: a third to a half of what its maker states",
)
@click.option("--micro-batch", type=click.IntRange(1), help="samples a GPU a forward pass  [default: the recipe's]")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="cpu: nodes without GPUs; --gpus-per-node and --gpu-memory are then processes and the RAM of one",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override section.field of RECIPE")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, in bytes and seconds")
def command(
    recipe: Path,
    nodes: int | None,
    gpus: int,
    gpu_memory: int,
    bandwidth: float,
    hub_bandwidth: float | None,
    tflops: float,
    micro_batch: int | None,
    device: Literal["cuda", "cpu"],
    overrides: tuple[str | Path, ...],
    as_json: bool,
) -> None:
    """Say what training by RECIPE needs: memory, network, time and disk, and whether it fits.

    Nothing is downloaded, allocated or started. The recipe is compared with DiLoCo (every node trains every expert) and
    with centralized training (no rounds: gradients are summed over all nodes in every step). Where it does not fit, the
    cheapest change with which it does is named.

    \b
    Examples:
      spes-mega plan configs/2b.yaml --gpu-memory 48GiB --bandwidth 1Gbps
      spes-mega plan configs/9b.yaml --nodes 4 --gpus-per-node 8 --gpu-memory 80GB --tflops 300 --json
    """
    from spes_mega.recipe import load_recipe
    from spes_mega.tools.plan.plan import Machines, make_plan
    from spes_mega.tools.plan.report import print_plan
    from spes_mega.tools.plan.suggest import suggest
    from spes_mega.tools.plan.traffic import Links

    given: dict[str, Any] = {"spes.num_nodes": nodes, "train.micro_batch_size": micro_batch}
    flags = [f"{key}={value}" for key, value in given.items() if value is not None]
    links = Links(bandwidth, hub_bandwidth or bandwidth)
    if not math.isfinite(tflops):
        raise click.BadParameter("a finite number is needed", param_hint="--tflops")
    plan = make_plan(load_recipe(recipe, [*overrides, *flags]), Machines(gpus, gpu_memory, links, tflops, device))
    suggestions = suggest(plan)
    if as_json:
        click.echo(json.dumps({**plan.as_json(), "suggestions": [one.as_json() for one in suggestions]}))
    else:
        print_plan(plan, suggestions)
