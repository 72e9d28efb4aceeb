"""`spes-mega hub`: hold the global weights of a run and close its rounds."""

import signal
from pathlib import Path
from types import FrameType

import click

from spes_mega.hub.access import TOKEN_VARIABLE, check_listen, read_token
from spes_mega.hub.allocator import return_large_blocks
from spes_mega.hub.console import Console
from spes_mega.hub.run import Run
from spes_mega.hub.server import HubServer
from spes_mega.recipe import load_recipe

STATE = click.Path(file_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)


@click.command("hub")
@click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--init", type=EXISTING, help="Checkpoint to start from; without it, weights are drawn with train.seed.")
@click.option(
    "--state", type=STATE, required=True, help="Directory of the run's rounds; a hub goes on from what it holds."
)
@click.option("--listen", default="127.0.0.1:7070", show_default=True, help="HOST:PORT; port 0 takes a free one.")
@click.option("--token-file", type=EXISTING, help=f"File with the shared token; or set {TOKEN_VARIABLE}.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field of the recipe."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    recipe: Path,
    init: Path | None,
    state: Path,
    listen: str,
    token_file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Hold the global weights of the run that RECIPE describes, and close its rounds.

    The run's state is in --state, and what is committed there survives any crash: start the same command again
    to go on. Writes a Hugging Face directory to STATE/snapshots every spes.snapshot_every rounds and at the end,
    waits until the nodes have left (spes.rpc_deadline_s at most, and 30 s for a node that missed a round and has not
    been heard of since), and exits with 0. Ctrl-C and SIGTERM stop it cleanly.
    """
    return_large_blocks()
    console = Console(as_json)
    loaded = load_recipe(recipe, overrides)
    token = read_token(token_file)
    check_listen(listen, token)
    run = Run(loaded, state, init, console)
    server = HubServer(run, listen, token, console)
    _stop_on_signals(server)
    finished = server.serve()
    text = f"run finished at round {run.newest.round}" if finished else f"hub stopped at round {run.newest.round}"
    console.say("end", text, finished=finished, round=run.newest.round)


def _stop_on_signals(server: HubServer) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once; the state stays whole
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
