"""The ways that CONTRIBUTING.md lists are those of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTION = TEXT.partition("## How a push, a pull and a close travel")[2].partition("\n## ")[0]
NAMED = sorted(set(re.findall(r"`([A-Z]\w+\.\w+)`", SECTION)))


@pytest.fixture(scope="module")
def methods():
    found = set()
    for file in (ROOT / "spes_mega").rglob("*.py"):
        for item in ast.walk(ast.parse(file.read_text())):
            if isinstance(item, ast.ClassDef):
                found |= {f"{item.name}.{part.name}" for part in item.body if isinstance(part, ast.FunctionDef)}
    return found


def test_the_section_names_the_ways():
    assert len(NAMED) > 15


@pytest.mark.parametrize("name", NAMED)
def test_a_named_method_exists(methods, name):
    assert name in methods


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:rpc|push|pull|close|rounds|state)/\w+\.py)`", SECTION))))
def test_a_named_file_exists(path):
    assert (ROOT / "spes_mega/hub" / path).is_file()
