"""The page on recovering explains messages that this version has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/recover.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| .* \|$", PAGE[PAGE.index("## What a message means") :], re.MULTILINE)[2:]
MESSAGES = [message for row in ROWS for message in re.findall(r"`(.*?)`", row)]
VARIABLE = re.compile(r"\bK\b|\bHOST\b|…")


@pytest.fixture(scope="module")
def texts():
    """All texts in the code; what stands between the pieces of an f-string is `{}`."""
    found = []
    for path in (ROOT / "spes_mega").rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(item, ast.JoinedStr):
                pieces = (part.value if isinstance(part, ast.Constant) else "{}" for part in item.values)
                found.append("".join(map(str, pieces)))
            elif isinstance(item, ast.Constant) and isinstance(item.value, str):
                found.append(item.value)
    return "\n".join(found)


def test_the_page_has_messages():
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(texts, message):
    for piece in VARIABLE.split(message):
        assert piece.strip() in texts
