"""A plan for a person: tables, and a verdict in words."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from spes_mega.sizes import gigabytes
from spes_mega.tools.plan.compute import tokens_per_step
from spes_mega.tools.plan.memory import TORCH, Build, runtime_bytes
from spes_mega.tools.plan.plan import Exchange, NodeGroup, Plan, Scheme
from spes_mega.tools.plan.suggest import Suggestion
from spes_mega.tools.plan.traffic import CODECS, CONFIGURED, merging_rounds, wire_text
from spes_mega.tools.plan.units import duration, rate

NARROW = 110
"""Columns that the tables need; elsewhere than on a terminal they always get them."""


def print_plan(plan: Plan, suggestions: list[Suggestion]) -> None:
    """Print it to the standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(NARROW, console.width))
    for part in (*_head(plan), _memory_table(plan), _round_table(plan), *_disk(plan), *_verdict(plan, suggestions)):
        console.print(part)


def _head(plan: Plan) -> Iterator[str]:
    counts, recipe, machines = plan.counts, plan.recipe, plan.machines
    spes, model = recipe.spes, recipe.model
    yield f"[bold]{recipe.name}[/bold]: {counts.total:,} parameters, {counts.active:,} used by a token"
    if model.is_moe:
        yield (
            f"  shared {counts.shared:,} + {counts.moe_layers} layers x {model.num_experts} experts x "
            f"{counts.expert:,} (top-{model.top_k})"
        )
    unit = "GPU" if machines.device == "cuda" else "process"
    yield (
        f"  {spes.num_nodes} nodes of {machines.gpus} {unit}{'s' if machines.gpus > 1 else ''} with "
        f"{gigabytes(machines.memory)} each, {rate(machines.links.node)} (hub {rate(machines.links.hub)}), "
        f"{machines.tflops:g} TFLOP/s a {unit}"
    )
    if machines.device == "cpu":
        held = {build: gigabytes(runtime_bytes("cpu", build)) for build in TORCH}
        other: Build = "cpu" if machines.torch == "cuda" else "cuda"
        yield (
            f"  {held[machines.torch]} of a process: Python and libraries, with the {machines.torch.upper()} build of "
            f"torch as here ({held[other]} with {other.upper()})"
        )
    train = recipe.train
    yield (
        f"  {train.dtype}, ZeRO-{train.zero_stage}, micro-batch {train.micro_batch_size} x {train.seq_len} tokens, "
        f"{tokens_per_step(recipe, machines.gpus):,} tokens a step and node, {spes.sync_every} steps a round"
    )


def _memory_table(plan: Plan) -> Table:
    unit = "GPU" if plan.machines.device == "cuda" else "process"
    table = Table(title=f"Memory of one {unit}, in GB", title_justify="left", caption_justify="left")
    table.caption = "peak: at the worst moment of a run; the parts do not all lie at the same one"
    for name in ("", "nodes", "experts", "trained", "weights", "optimizer", "gradients", "activations", "peak", "fits"):
        table.add_column(name, justify="left" if not name else "right")
    for scheme in plan.schemes:
        for index, group in enumerate(scheme.groups):
            table.add_row(scheme.name if not index else "", *_memory_cells(plan, group))
    return table


def _memory_cells(plan: Plan, group: NodeGroup) -> list[str]:
    memory = group.memory
    gradients = memory.gradients_held + memory.gradients_fresh
    activations = memory.activations + max(memory.loss, memory.layer)
    sizes = (memory.weights, memory.optimizer, gradients, activations, memory.peak)
    experts = f"{group.owned} of {plan.recipe.model.num_experts}" if plan.recipe.model.is_moe else "-"
    verdict = "[green]yes[/green]" if group.fits else "[red]NO[/red]"
    return [_numbers(group.nodes), experts, f"{group.trained / 1e6:,.0f} M", *map(_short, sizes), verdict]


def _short(count: int) -> str:
    return f"{count / 1e9:,.2f}"


def _numbers(nodes: tuple[int, ...]) -> str:
    if len(nodes) > 2 and nodes == tuple(range(nodes[0], nodes[-1] + 1)):
        return f"{nodes[0]}-{nodes[-1]}"
    return ",".join(map(str, nodes))


def _round_table(plan: Plan) -> Table:
    spes = plan.recipe.spes
    table = Table(title=f"One round of {spes.sync_every} steps", title_justify="left", caption_justify="left")
    table.caption = _round_caption(plan)
    for name in ("", "compute", "sent as", "up", "down", "with merge", "node's link", "hub's link", "lost"):
        table.add_column(name, justify="left" if name in ("", "sent as") else "right")
    for scheme in plan.schemes:
        for index, (sent_as, exchange) in enumerate(_rows(plan, scheme)):
            start = (scheme.name, duration(scheme.compute_s)) if not index else ("", "")
            table.add_row(*start, sent_as, *_exchange_cells(exchange))
    return table


def _rows(plan: Plan, scheme: Scheme) -> Iterator[tuple[str, Exchange]]:
    """The recipe's own codecs first; or marked, if it is one for everything."""
    said = wire_text(plan.recipe.spes.wire)
    if CONFIGURED in scheme.exchanges and said not in CODECS:
        yield CONFIGURED, scheme.exchanges[CONFIGURED]
    for codec in CODECS:
        if codec in scheme.exchanges:
            own = codec == said and CONFIGURED in scheme.exchanges
            yield (f"{codec} *" if own else codec), scheme.exchanges[codec]


def _round_caption(plan: Plan) -> str:
    spes, merging = plan.recipe.spes, merging_rounds(plan.recipe)
    lines = ["up, down: of the node that moves most; lost: of the time, to the slower of the two links"]
    if merging:
        lines.append(f"{merging} of {plan.recipe.num_rounds} rounds end with a merge")
    said = wire_text(spes.wire)
    lines.append("*: by spes.wire" if said in CODECS else f"spes.wire: {said}")
    if spes.overlap:
        lines.append("spes.overlap: what is no longer than the next round's compute is not lost (but in the last)")
    return "\n".join(lines)


def _exchange_cells(exchange: Exchange) -> list[str]:
    merged = gigabytes(exchange.down_after_merge) if exchange.down_after_merge != exchange.down else ""
    hub = duration(exchange.hub_link_s) if exchange.hub_link_s else "-"
    moved = (gigabytes(exchange.up), gigabytes(exchange.down), merged)
    return [*moved, duration(exchange.node_link_s), hub, f"{exchange.share_lost:.1%}"]


def _disk(plan: Plan) -> Iterable[str]:
    disk, spes = plan.disk, plan.recipe.spes
    beside = (
        f" and {gigabytes(disk.hub_beside)} of residuals, changes and momentum beside it" if disk.hub_beside else ""
    )
    yield (
        f"Disk of the hub: {gigabytes(disk.hub_state)} for its state ({gigabytes(disk.hub_weights)} of weights, three "
        f"times{beside}; {gigabytes(disk.hub_pushes)} of pushes), {gigabytes(disk.hub_snapshots)} for all snapshots "
        f"(one every {spes.snapshot_every} rounds)"
    )
    parts = [f"{gigabytes(disk.node_spools)} for what is on its way"]
    if disk.node_overlap:
        parts.append(f"{gigabytes(disk.node_overlap)} for spes.overlap")
    if disk.node_moving:
        parts.append(f"{gigabytes(disk.node_moving)} while experts change hands")
    yield f"Disk of a node: {', '.join(parts)}, {gigabytes(disk.node_checkpoints)} for checkpoints"
    if host := max(group.memory.host for group in plan.spes.groups):
        offload = plan.recipe.deepspeed["zero_optimization"]["offload_optimizer"]
        where = "NVMe" if offload["device"] == "nvme" else "RAM"
        yield f"{where} of a node for the optimizer that is offloaded: {gigabytes(host * plan.machines.gpus)}"


def _verdict(plan: Plan, suggestions: list[Suggestion]) -> Iterator[str]:
    limit = f"{gigabytes(plan.machines.memory)} (of which 95 % can be counted on)"
    if plan.spes.fits:
        yield f"[bold green]It fits[/bold green]: at most {gigabytes(plan.spes.peak)} of {limit}."
        return
    yield f"[bold red]It does not fit[/bold red]: {gigabytes(plan.spes.peak)} are needed of {limit}."
    for one in suggestions:
        lead = "Cheapest change that fits" if one.fits else "Nothing found that fits; this comes nearest"
        flags = " ".join(f"--set {setting}" for setting in one.settings)
        yield f"{lead}: [bold]{flags}[/bold]  ->  {gigabytes(one.peak_bytes)}"
        yield f"  it costs: {'; '.join(one.price)}"
