"""`--overlay` on the commands that take a recipe."""

import click
import pytest
import yaml
from click.testing import CliRunner

from spes_mega.cli import COMMANDS, group
from spes_mega.node.main import command as rank_command
from spes_mega.overlays import accept_overlays

TAKES_A_RECIPE = ("recipe", "plan", "hub", "launch", "upcycle")


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_take_a_recipe_take_overlays(name):
    command = group.get_command(click.Context(group), name)
    assert ("--overlay" in str([parameter.opts for parameter in command.params])) == (name in TAKES_A_RECIPE)


def test_the_ranks_take_them_too():
    assert "--overlay" in str([parameter.opts for parameter in rank_command.params])


def test_a_command_gets_files_before_settings_in_the_order_given(tmp_path):
    found = []

    @click.command()
    @click.option("--set", "overrides", multiple=True)
    def command(overrides):
        found.append(overrides)

    for _ in range(2):  # giving the option twice is giving it once
        accept_overlays(command)
    command.main(["--set", "a=1", "--overlay", "x", "--overlay", "y", "--set", "b=2"], standalone_mode=False)
    ((first, second, *settings),) = found
    assert [str(first), str(second), *settings] == ["x", "y", "a=1", "b=2"]
    assert not isinstance(first, str)


def test_the_recipe_is_shown_merged(tmp_path):
    over = tmp_path / "over.yaml"
    over.write_text("spes: {sync_every: 3, num_nodes: 4}\n")
    arguments = ["recipe", "configs/tiny.yaml", "--overlay", str(over), "--set", "spes.num_nodes=1"]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.output)["spes"]["sync_every"] == 3
    assert yaml.safe_load(result.output)["spes"]["num_nodes"] == 1


@pytest.mark.parametrize("arguments", [["recipe"], ["upcycle", "."]])
def test_an_overlay_without_a_recipe_is_a_usage_error(arguments):
    result = CliRunner().invoke(group, [*arguments, "--overlay", "x.yaml"])
    assert result.exit_code == 2
    assert "--overlay change a" in result.output
