"""The options of a node, shared by the launched ranks and by `spes-mega launch`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from spes_mega.errors import DataError, system_errors
from spes_mega.recipe.agreement import CHANGEABLE
from spes_mega.security.access import Access, read_access

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class NodeOptions:
    """What a node is told beside its recipe."""

    recipe: Path
    node: int
    hub: str | None
    out: Path
    init: Path | None
    keys: Path | None
    token_file: Path | None
    insecure: bool
    resume: str
    """auto, never, or the path of a checkpoint."""
    change: tuple[str, ...]
    """Fields that may have had another meaning in the checkpoint that is resumed."""
    overrides: tuple[str | Path, ...]
    """As `load_recipe` takes them: overlays, then settings."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> "NodeOptions":
        """From the values that click gives; raises click.UsageError where they contradict each other."""
        if options["hub"] is not None and options["init"] is not None:
            raise click.UsageError("--init is for a node without a hub; give it to `spes-mega hub`")
        out = options.pop("out") or Path("runs") / f"node-{options['node']}"
        overrides = options.pop("overrides")
        if (data := options.pop("data")) is not None:
            # absolute, since relative paths in a recipe start at the recipe's folder; JSON is YAML, quoted
            with system_errors(DataError):
                overrides = (*overrides, f"data.train={json.dumps(str(data.resolve()))}")
        return cls(out=out, overrides=overrides, **options)

    def access(self) -> Access:
        """What to show the hub. Raises AccessError if keys or token cannot be used, or the line needs keys."""
        assert self.hub is not None
        return read_access(self.hub, self.keys, self.token_file, self.insecure)

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        pairs = {
            "--node": self.node,
            "--hub": self.hub,
            "--out": self.out,
            "--init": self.init,
            "--keys": self.keys,
            "--token-file": self.token_file,
            "--resume": self.resume,
        }
        given = [part for flag, value in pairs.items() if value is not None for part in (flag, str(value))]
        insecure = ["--insecure"] if self.insecure else []
        over = [("--overlay" if isinstance(one, Path) else "--set", str(one)) for one in self.overrides]
        changes = [part for field in self.change for part in ("--change", field)]
        return [str(self.recipe), *given, *insecure, *changes, *(part for pair in over for part in pair)]


def node_options(command: Command) -> Command:
    """Add the options of `NodeOptions` to a command."""
    path = click.Path(path_type=Path)
    for option in reversed(
        (
            click.argument("recipe", type=path),
            click.option("--node", type=click.IntRange(0), default=0, show_default=True, help="number of this node"),
            click.option("--hub", metavar="HOST:PORT", help="the run's hub; without it this node trains alone"),
            click.option("--data", type=path, metavar="PREFIX", help="this node's training data, for data.train"),
            click.option("--out", type=path, help="for metrics and results  [default: runs/node-K]"),
            click.option("--init", type=path, help="without a hub: checkpoint directory to start from, not the seed"),
            click.option("--keys", type=path, metavar="DIR", help="this node's keys: TLS, and its token"),
            click.option("--token-file", type=path, help="a token that all nodes share  [default: $SPES_MEGA_TOKEN]"),
            click.option("--insecure", is_flag=True, help="speak to a hub on another machine without TLS"),
            click.option(
                "--resume",
                default="auto",
                show_default=True,
                metavar="auto|never|PATH",
                help="checkpoint to go on from; auto: the newest in OUT/checkpoints",
            ),
            click.option(
                "--change",
                multiple=True,
                type=click.Choice(CHANGEABLE),
                help="go on from a checkpoint in which this field had another meaning",
            ),
            click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override section.field"),
        )
    ):
        command = option(command)
    return command
