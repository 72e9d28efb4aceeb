"""The README lists every command, its lines are ones that this version takes, and its links lead somewhere."""

import re
import shlex
from pathlib import Path

import click
import pytest

from spes_mega import __version__
from spes_mega.cli import COMMANDS, group

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| `spes-mega (.*?)` \|", TEXT, re.MULTILINE)


def test_every_command_has_its_line():
    assert [line.split()[0] for line in LINES] == list(COMMANDS)


@pytest.mark.parametrize("line", LINES)
def test_the_options_of_a_line_exist(line):
    name, *rest = shlex.split(line)
    command = group.get_command(click.Context(group), name)
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    known = {option for parameter in command.params for option in parameter.opts}
    assert {part for part in rest if part.startswith("--")} <= known


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = {target for target in re.findall(r"\]\(([^)#]*)[^)]*\)", text) if target and "://" not in target}
    assert targets
    assert [target for target in targets if not (ROOT / target).is_file()] == []


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
def test_make_has_the_target(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w.]+/[\w./-]*)`", CONTRIBUTING))))
def test_files_to_touch_are_where_they_are_said_to_be(path):
    roots = (ROOT, ROOT / "spes_mega", ROOT / "spes_mega/hub", ROOT / "spes_mega/node", ROOT / "upcycle")
    assert path == "site/" or any((root / path).exists() for root in roots)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make (\S+)`", CONTRIBUTING))))
def test_make_has_the_targets_of_contributors(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_changelog_has_this_version_and_its_pages():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    pages = set(re.findall(r"`((?:docs|benchmarks)/[\w/.-]+)`", text))
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []
