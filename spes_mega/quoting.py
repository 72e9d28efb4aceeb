"""Text that comes from a peer, before it is shown, logged, listed or sent on."""

LONGEST = 2000
LONGEST_NAME = 100


def printable(text: str, most: int | None = LONGEST) -> str:
    """Return `text` as one line that can be encoded and shown on a terminal.

    Line breaks, control characters, marks that change the direction of text, and lone surrogates are escaped; what is
    longer than `most` characters is cut.
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most])
    return safe if most is None or max(len(safe), len(text)) <= most else safe[: most - 1] + "…"


def quoted(text: str, most: int = LONGEST_NAME) -> str:
    """Return a name or value that a peer chose, in quotation marks, so that it cannot pass for words of ours."""
    return "'" + printable(text, most).replace("'", r"\'") + "'"
