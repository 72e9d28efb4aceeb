"""Entry point of a node's ranks: what the `deepspeed` launcher starts (`launchers/train.py`, `spes-mega launch`)."""

import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import click

from spes_mega.crash_report import fault_text, foreseen_text, summary_of
from spes_mega.errors import SpesError
from spes_mega.node.distributed.lifelines import LostRankError
from spes_mega.node.distributed.machines import compare_data, one_node
from spes_mega.node.distributed.place import Place, take_place
from spes_mega.node.launch.reports import MARK_VARIABLE, tell
from spes_mega.node.options import NodeOptions, node_options
from spes_mega.node.out_lock import lock_out
from spes_mega.node.preflight import check_node
from spes_mega.node.stop import Stopped, StopRequest, stop_without_launcher
from spes_mega.output import outlive_output, standard_streams
from spes_mega.overlays import accept_overlays
from spes_mega.recipe import Recipe, load_recipe


def train(options: NodeOptions) -> None:
    """Run one rank of a node to the end of its recipe.

    Raises SpesError, the same on all ranks; Stopped after Ctrl-C or SIGTERM.
    """
    place = take_place()
    recipe = load_recipe(options.recipe, options.overrides)
    check_node(recipe, options.node, options.hub)
    prepare_process(place.local_size)
    from spes_mega.node.distributed.process_group import naming_both_ends, process_group
    from spes_mega.node.distributed.ranks import Ranks

    stop = StopRequest()
    stop.install()
    stop_without_launcher()
    spes = recipe.spes
    with process_group(place, spes.join_deadline_s):
        with naming_both_ends(place, spes.join_deadline_s):
            ranks = Ranks(patience_s=spes.join_deadline_s + 2 * spes.round_deadline_s + 3 * spes.rpc_deadline_s)
        with one_node(recipe, options, place, ranks, stop):
            _Node(recipe, options, ranks, stop, place).run()


def prepare_process(ranks_here: int) -> None:
    """Make the settings that torch and DeepSpeed need early, for one of `ranks_here` processes on this machine."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found nothing better
    if "OMP_NUM_THREADS" not in os.environ:
        # each rank would take all cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    # A CUDA build of torch says that there is a CUDA toolkit and no GPU; a node then is one on the CPU, which it says
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # DeepSpeed calls what the newest torch renames
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import spes_mega.model  # noqa: F401 - before anything else imports Megatron-Core: it knows how to do that quietly


class _Node:
    """One rank of a node, inside its process group."""

    def __init__(self, recipe: Recipe, options: NodeOptions, ranks: Any, stop: StopRequest, place: Place) -> None:
        from spes_mega.node.metrics import ConsoleReport

        self.recipe, self.options, self.ranks, self.stop, self.place = recipe, options, ranks, stop, place
        leads = self.ranks.leads
        self.report = ConsoleReport(options.node, recipe.train.steps, recipe.train.log_every) if leads else None

    def say(self, text: str) -> None:
        if self.report is not None:
            self.report.say(text)

    def run(self) -> None:
        from spes_mega.data.samples import NodeData
        from spes_mega.node.checkpoint.resume import Resume

        data = self.ranks.agree(
            lambda: NodeData(self.recipe, self.options.node, rank=self.ranks.rank, ranks=self.ranks.size)
        )
        if self.ranks.where is not None:
            self._compare_data(data)
        self.ranks.first(lambda: lock_out(self.options.out))
        self.ranks.first(lambda: self._check_tokens(data))
        with Resume(self.recipe, self.options, data, self.ranks, self.say) as resume, self._source() as source:
            self._train(data, source, resume)

    def _check_tokens(self, data: Any) -> None:
        from spes_mega.progress import count_progress

        def seen(count: int) -> None:
            self.stop.check()
            advance(count)

        with count_progress("check the token ids", data.stream.num_tokens, "tokens") as advance:
            data.check_tokens(seen)

    def _compare_data(self, data: Any) -> None:
        """Raise DataError, on all ranks: a machine has other training data than rank 0's."""

        def read() -> Any:
            identity = data.identity() if self.place.local_rank == 0 or self.ranks.leads else None
            return identity and (self.place.host, asdict(identity), identity.text)

        everyone = self.ranks.everyone(read)
        self.ranks.first(lambda: compare_data(everyone))

    @contextmanager
    def _source(self) -> Iterator[Any]:
        if self.options.hub is None:
            from spes_mega.node.sync.lone_node import LoneNode

            yield LoneNode(self.recipe, self.ranks, self.options.out, self.options.init)
            return
        from spes_mega.client.client import HubClient
        from spes_mega.node.sync.hub_node import HubNode

        client = None
        access = None

        def read_access() -> None:  # only rank 0's machine needs keys
            nonlocal access
            access = self.options.access()

        self.ranks.first(read_access)
        if access is not None:
            client = HubClient.for_recipe(
                self.recipe,
                self.options.hub,
                self.options.node,
                access=access,
                spool_dir=self.options.out,
                say=self.say,
            )
        capacity = self.recipe.spes.capacity
        arguments = (self.options.node, self.recipe.ownership(), self.ranks, self.stop, client, self.say, capacity)
        if self.recipe.spes.overlap:
            from spes_mega.node.sync.overlap import OverlappingHubNode

            rounds = self.recipe.num_rounds
            source: HubNode = OverlappingHubNode(*arguments, num_rounds=rounds, spool_dir=self.options.out)
        else:
            source = HubNode(*arguments)
        try:
            source.join()
            yield source
        finally:
            source.leave()
            if client is not None:
                client.close()

    def _train(self, data: Any, source: Any, resume: Any) -> None:
        from spes_mega.node.loop import NodeRun
        from spes_mega.node.metrics import MetricsFile
        from spes_mega.node.trainer import Trainer
        from spes_mega.node.zero.local_model import LocalModel

        steps = resume.steps(source.owned)
        model = LocalModel(self.recipe, source.owned, self.ranks, self.stop, self.options.out, steps)
        self.say(_describe(model, self.ranks))
        begin = resume.take_up(model, source)
        trainer = Trainer(self.recipe, model, data, self.ranks, self.stop)
        metrics = None

        def open_metrics() -> None:
            nonlocal metrics
            metrics = MetricsFile(self.options.out / "metrics.jsonl", begin.step)

        self.ranks.first(open_metrics)
        with self.report or nullcontext(), metrics or nullcontext(), resume.saver(model, begin, source) as saver:
            NodeRun(self.recipe, trainer, model, source, self.report, metrics, saver, self.options.node).run(begin)
            self.say("finished; " + source.result)


def _describe(model: Any, ranks: Any) -> str:
    from spes_mega.outer.ownership import ranges

    recipe, entries = model.recipe, model.map.entries
    total = sum(math.prod(entry.shape) for entry in entries)
    trainable = sum(math.prod(entry.shape) for entry in entries if entry.parameter.requires_grad)
    experts = f", experts {ranges(model.owned)} of {recipe.model.num_experts}" if recipe.model.is_moe else ""
    return (
        f"{total:,} parameters, {trainable:,} trained here{experts}; {recipe.train.dtype}, "
        f"ZeRO-{recipe.train.zero_stage}, {ranks.size} rank{'s' if ranks.size > 1 else ''} on {ranks.device.type}"
    )


@accept_overlays
@click.command()
@node_options
@click.option("--local_rank", type=int, hidden=True, help="given by the deepspeed launcher")
@click.option("--mark", hidden=True, help="given by `spes-mega launch` to ranks on other machines")
def command(local_rank: int | None, mark: str | None, **options: Any) -> None:
    """Train as one rank of one node of a run; started by the deepspeed launcher, torchrun or srun."""
    if mark is not None:
        os.environ[MARK_VARIABLE] = mark
        take_place()
    train(NodeOptions.of(options))


@standard_streams()
def main(run: Callable[..., Any] = command.main) -> None:
    """Run the command; every rank exits with the code of what ended it.

    Rank 0 prints the message; all tell `spes-mega launch` how they ended, which prints what rank 0 cannot know.
    """
    outlive_output()
    try:
        run(standalone_mode=False)
    except (SpesError, Stopped) as e:
        lost = isinstance(e, LostRankError)
        _end(str(e), e.exit_code, stopped=isinstance(e, Stopped), trace=getattr(e, "trace", ""), lost=lost)
    except click.ClickException as e:
        _end(e.format_message(), e.exit_code)
    except Exception as e:
        if (foreseen := foreseen_text(e)) is not None:
            _end(foreseen, 1)
        # Perhaps only because another rank was lost: `spes-mega launch` knows, and shows it if it is the cause.
        message, trace = f"{summary_of(e)} (rank {os.environ.get('RANK', '0')})", traceback.format_exc()
        if not tell(code=1, message=message, trace=trace):
            click.echo(f"error: {fault_text(message, trace)}", err=True)
        sys.exit(1)
    tell(code=0)


def _end(message: str, exit_code: int, *, stopped: bool = False, trace: str = "", lost: bool = False) -> None:
    reports = os.environ.get("LOCAL_RANK" if lost else "RANK", "0") == "0"  # rank 0 may be the one that was lost
    if reports:
        text = fault_text(message, trace) if trace else message
        click.echo(text if stopped else f"error: {text}", err=True)
    tell(code=exit_code, message=message, trace=trace, shown=reports)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
