"""What peers say can be shown, and cannot pass for words of ours."""

import pytest

from spes_mega.quoting import printable, quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 字", "plain ü 字"),
        ("a\nround 7/9", r"a\nround 7/9"),
        ("a\r\x0b\x85\u2028b", r"a\r\x0b\x85\u2028b"),  # all that str.splitlines takes for the end of a line
        ("\x1b[31m\x07\x9b2J", r"\x1b[31m\x07\x9b2J"),
        ("a\u202eb\u2066c\u200d", r"a\u202eb\u2066c\u200d"),  # marks of direction, and what has no width
        ("\ud800", r"\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped(text, shown):
    assert printable(text) == shown
    assert quoted(text) == f"'{shown}'"


def test_what_is_long_is_cut_however_it_is_written():
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("x" * 11, 10) == "x" * 9 + "…"
    assert printable("\n" * 8, 10) == r"\n" * 4 + "\\…"
    assert len(printable("\U0001f1e6\ue000" * 10**6)) == 2000
    assert len(quoted("x" * 10**6)) == 102


def test_a_quotation_does_not_end_early():
    assert quoted("a' is whole, 'b") == r"'a\' is whole, \'b'"
