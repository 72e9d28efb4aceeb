import click
import pytest
from click.testing import CliRunner

from spes_mega.errors import RecipeError
from spes_mega.options import merge_options, recipe_options
from spes_mega.recipe import ModelSection, TrainSection, UpcycleSection


def test_each_field_of_the_section_is_a_flag_with_its_default_in_the_help():
    @click.command()
    @recipe_options(UpcycleSection)
    def command(**given):
        click.echo(sorted((k, v) for k, v in given.items() if v is not None))

    text = CliRunner().invoke(command, ["--help"]).output
    for name in UpcycleSection.model_fields:
        assert "--" + name.replace("_", "-") in text
    assert "[default: 0.02]" in text
    result = CliRunner().invoke(command, ["--num-experts", "4", "--method", "copy"])
    assert result.output.strip() == "[('method', 'copy'), ('num_experts', 4)]"
    assert CliRunner().invoke(command, ["--method", "magic"]).exit_code == 2


def test_choices_of_whole_numbers_and_switches_are_parsed():
    @click.command()
    @recipe_options(TrainSection)
    @recipe_options(ModelSection)
    def command(**given):
        click.echo(repr((given["tie_embeddings"], merge_options(TrainSection(), given).zero_stage)))

    assert CliRunner().invoke(command, ["--no-tie-embeddings", "--zero-stage", "3"]).output.strip() == "(False, 3)"


def test_given_options_win_and_contradictions_are_named():
    merged = merge_options(UpcycleSection(noise_std=0.5), {"num_experts": 4, "noise_std": None, "other": 1})
    assert (merged.num_experts, merged.noise_std) == (4, 0.5)
    with pytest.raises(RecipeError, match="command line: top_k 5 is more than num_experts 4"):
        merge_options(UpcycleSection(), {"num_experts": 4, "top_k": 5})
