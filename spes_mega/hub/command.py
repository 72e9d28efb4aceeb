"""`spes-mega hub`: hold the global weights of a run and close its rounds."""

import gc
import signal
from pathlib import Path
from types import FrameType

import click
import torch

from spes_mega.hub.allocator import reuse_blocks
from spes_mega.hub.console import Console
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.rpc.server import HubServer
from spes_mega.hub.run import Run
from spes_mega.hub.state.drain import drain
from spes_mega.layout.families.rope import llama3_factor
from spes_mega.output import outlive_output
from spes_mega.recipe import load_recipe
from spes_mega.recipe.agreement import CHANGEABLE
from spes_mega.security.access import TOKEN_VARIABLE, check_listen, exposed, read_token
from spes_mega.security.keys import read_hub
from spes_mega.signals import handle

STATE = click.Path(file_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)


@click.command("hub")
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--init", type=EXISTING, help="Checkpoint to start from; without it, weights are drawn with train.seed.")
@click.option(
    "--state", type=STATE, required=True, help="Directory of the run's rounds; a hub goes on from what it holds."
)
@click.option("--listen", default="127.0.0.1:7070", show_default=True, help="HOST:PORT; port 0 takes a free one.")
@click.option("--keys", type=STATE, help="Directory with the hub's keys: TLS, and a token for each node.")
@click.option("--mutual-tls", is_flag=True, help="Nodes have to show the certificates of their keys too.")
@click.option("--token-file", type=EXISTING, help=f"File with a token that all nodes share; or set {TOKEN_VARIABLE}.")
@click.option("--insecure", is_flag=True, help="Listen to other machines without TLS, as behind a VPN.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field of the recipe."
)
@click.option(
    "--change",
    multiple=True,
    type=click.Choice(CHANGEABLE),
    help="Go on with a state in which this field had another meaning.",
)
@click.option("--drain", "draining", is_flag=True, help="Ask the hub that uses --state to end after its open round.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    recipe: Path,
    init: Path | None,
    state: Path,
    listen: str,
    keys: Path | None,
    mutual_tls: bool,
    token_file: Path | None,
    insecure: bool,
    overrides: tuple[str, ...],
    change: tuple[str, ...],
    draining: bool,
    as_json: bool,
) -> None:
    """Hold the global weights of the run that RECIPE describes, and close its rounds.

    The run's state is in --state, and what is committed there survives any crash: start the same command again
    to go on. Writes a Hugging Face directory to STATE/snapshots every spes.snapshot_every rounds and at the end,
    waits until the nodes have left (spes.rpc_deadline_s at most, and 30 s for a node that missed a round and has not
    been heard of since), and exits with 0. Ctrl-C and SIGTERM stop it cleanly at once. With --drain the command asks
    another hub, the one that uses --state, to close its open round, let nodes fetch the result, keep a snapshot of it,
    and end, and waits for it (SIGUSR1 asks the same): start a hub on the same --state again, and nodes that were
    training notice nothing.
    """
    console = Console(as_json)
    if draining:
        _drain(state, console)
        return
    outlive_output()
    reuse_blocks()
    torch.set_num_threads(1)  # of an operation on some rows; threads that wait for the next one would spin
    loaded = load_recipe(recipe, overrides)
    llama3_factor(loaded.model)  # no node could run another variant
    shared = read_token(token_file) if token_file or keys is None else None
    for warning in exposed(keys, token_file):
        click.echo(warning, err=True)
    guard = Guard.of(read_hub(keys) if keys else None, shared, mutual_tls)
    check_listen(listen, token=bool(guard.callers), encrypted=guard.keys is not None, insecure=insecure)
    server = HubServer(loaded, listen, guard, console)
    run = Run(loaded, state, init, console, change)
    _stop_on_signals(run)
    gc.freeze()  # what is loaded stays: the collector need not look through it in the midst of a round's closing
    finished = server.serve(run)
    round_ = run.state.newest.round
    text = f"run finished at round {round_}" if finished else f"hub stopped at round {round_}"
    console.say("end", text, finished=finished, round=round_)


def _drain(state: Path, console: Console) -> None:
    drained = drain(state)
    text = f"the hub of {state} has ended" if drained else f"no hub is using {state}: there is nothing to drain"
    console.say("drained", text, drained=drained)


def _stop_on_signals(run: Run) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once; the state stays whole
        run.state.rounds.shutdown.stop()

    handle((signal.SIGINT, signal.SIGTERM), stop)
    signal.signal(signal.SIGUSR1, lambda number, frame: run.state.rounds.shutdown.drain())
