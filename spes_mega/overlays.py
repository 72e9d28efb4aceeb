"""`--overlay` for commands with a recipe. Imports nothing heavy: every command goes through here."""

import functools
from pathlib import Path
from typing import Any

import click


def accept_overlays(command: click.Command) -> click.Command:
    """Give `--overlay FILE` to a command with `--set`; a command without, or with `--overlay` already, stays as it is.

    Its parameter `overrides`, made for `load_recipe`, then begins with the files, as `Path`s.
    """
    names = {parameter.name for parameter in command.params}
    call = command.callback
    if "overrides" not in names or "overlays" in names or call is None:
        return command

    @functools.wraps(call)
    def with_overlays(overlays: tuple[Path, ...], overrides: tuple[str, ...], **others: Any) -> Any:
        return call(overrides=(*overlays, *overrides), **others)

    place = next(index for index, parameter in enumerate(command.params) if parameter.name == "overrides")
    text = "YAML file with keys to lay over the recipe's, before --set; may be given several times"
    kind = click.Path(path_type=Path)
    option = click.Option(["--overlay", "overlays"], multiple=True, type=kind, metavar="FILE", help=text)
    command.params.insert(place, option)
    command.callback = with_overlays
    return command
