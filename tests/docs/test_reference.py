"""The generated pages of the reference have every command with its options, and every field of the recipe."""

import re
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from docs.hooks.reference import on_page_markdown
from spes_mega.cli import COMMANDS, group
from spes_mega.recipe import Recipe

PAGES = Path(__file__).parents[2] / "docs/reference"


def page(name):
    return on_page_markdown((PAGES / name).read_text(encoding="utf-8"))


def section(text, heading):
    """What stands below a heading, up to the next one of its depth or less."""
    depth = len(heading) - len(heading.lstrip("#"))
    begin = text.index(f"\n{heading}\n") + len(heading) + 2
    following = re.search(rf"^#{{1,{depth}}} ", text[begin:], re.MULTILINE)
    return text[begin : begin + following.start()] if following else text[begin:]


@pytest.fixture(scope="module")
def commands():
    return page("commands.md")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section_with_its_options(commands, name):
    command = group.get_command(click.Context(group), name)
    text = section(commands, f"## spes-mega {name}")
    inner = command.commands if isinstance(command, click.Group) else {}
    for one, heading in [(command, ""), *((sub, f"### spes-mega {name} {sub.name}") for sub in inner.values())]:
        own = section(text, heading) if heading else text
        for parameter in one.params:
            if isinstance(parameter, click.Argument):
                assert parameter.make_metavar(click.Context(one)) in own
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                (row,) = (line for line in own.splitlines() if re.match(rf"\| `[^`]*{option}(?![\w-])", line))
                assert len(row.split(" | ")) == 2


def test_a_help_text_is_shown_as_it_is_written(commands):
    text = section(commands, "## spes-mega upcycle")
    assert "split      copies, each cut into smaller experts               exactly the same" in text
    assert "`--top-k` experts it finds best" in text
    assert "\b" not in commands


def test_every_field_has_a_row_with_its_default_and_meaning():
    rows = dict(re.findall(r"^\| `([\w.]+)` (\|.*)$", page("recipe.md"), re.MULTILINE))
    assert set(rows) == set(fields(Recipe))
    assert rows["spes.sync_every"] == "| whole number over 0 | `100` | local steps between two synchronizations (H) |"
    assert rows["model.family"].startswith("| `qwen3`, `qwen2`, ")
    assert "| required |" in rows["model.family"]
    assert rows["train.zero_stage"].startswith("| `1`, `2`, `3` | `1` | **local.** ")
    assert rows["spes.min_nodes"].startswith("| whole number over 0 | `null` | **local.** ")
    assert rows["model.dense_layers"].startswith("| list of whole numbers | `[]` | ")


def fields(section, path=""):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_pages_without_a_mark_stay_as_they_are():
    text = (PAGES / "exit-codes.md").read_text(encoding="utf-8")
    assert on_page_markdown(text, page=None, config=None, files=None) == text
