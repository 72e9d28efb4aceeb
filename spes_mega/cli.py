"""The `spes-mega` command. Subcommands are loaded when used, so that `--help` answers at once."""

import importlib
import sys
from typing import Any

import click

from spes_mega import __version__
from spes_mega.crash_report import end_of
from spes_mega.output import ReaderGone, standard_streams
from spes_mega.overlays import accept_overlays

# name -> (module:attribute, one line of help). The help stands here so that listing it imports nothing.
COMMANDS = {
    "demo": ("spes_mega.tools.demo.command:command", "Run the whole job on this machine in a few minutes."),
    "tokenize": ("spes_mega.data.tokenize:command", "Turn text files into an indexed dataset."),
    "upcycle": ("upcycle.command:command", "Turn a dense checkpoint into a Mixture-of-Experts."),
    "recipe": ("spes_mega.tools.recipe:command", "Explain every field of a recipe, with its value or default."),
    "convert": ("spes_mega.tools.convert:command", "Write a checkpoint as another family, dtype or format."),
    "inspect": ("spes_mega.tools.inspect:command", "Show what a checkpoint is, and how alike its experts are."),
    "keys": ("spes_mega.security.command:command", "Make the keys of a run: certificates, and a token for each node."),
    "plan": ("spes_mega.tools.plan.command:command", "Memory, network and time that a recipe needs, before it is run."),
    "hub": ("spes_mega.hub.command:command", "Hold the global weights and close the rounds of a run."),
    "launch": ("spes_mega.node.launch.command:command", "Train as one node of a run, under the deepspeed launcher."),
    "status": ("spes_mega.tools.status:command", "Show what a running hub is doing."),
    "evaluate": ("spes_mega.evaluation.evaluate:command", "Loss and perplexity of a checkpoint on an indexed dataset."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return accept_overlays(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="spes-mega")
def group() -> None:
    """Pretrain a Mixture-of-Experts language model on GPUs in places that are far apart.

    A dense checkpoint is upcycled into an MoE; a hub holds its weights; each node trains the shared
    weights and the experts that it owns, and synchronizes with the hub every few steps.
    """


def main(argv: list[str] | None = None) -> None:
    """Entry point: whatever ends a command becomes one message and an exit code, without a traceback."""
    with standard_streams():
        code = _run(argv)
    sys.exit(code)


def _run(argv: list[str] | None) -> int:
    try:
        result: Any = group.main(args=argv, prog_name="spes-mega", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except ReaderGone as e:
        return e.exit_code
    except Exception as e:
        end = end_of(e)
        click.echo(end.message, err=True)
        return end.exit_code


if __name__ == "__main__":
    main()
