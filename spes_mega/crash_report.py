"""How a command ends: one line for the user, its exit code, and a file with the traceback of what nobody foresaw."""

import errno
import os
import sys
import tempfile
import traceback
from typing import NamedTuple

from spes_mega import __version__
from spes_mega.errors import SpesError, cause_of

_SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS, errno.EFBIG)
"""What the system runs out of, or refuses to all; no fault of this program."""


MAX_LINE = 10_000


class End(NamedTuple):
    """What to print on stderr, and the exit code."""

    message: str
    exit_code: int


def end_of(error: Exception) -> End:
    """What to tell the user of the error that ended a command.

    An error of the system that names a path, or a shortage, is the user's to mend. All else is a fault of this
    program: its traceback is written to a file, or is part of the message where no file can be written.
    """
    if isinstance(error, SpesError):
        return End("\n".join(map(_cut, f"error: {error}".splitlines())), error.exit_code)
    if (foreseen := foreseen_text(error)) is not None:
        return End(f"error: {foreseen}", 1)
    trace = "".join(traceback.format_exception(error))
    return End(f"error: {fault_text(summary_of(error), trace)}", 1)


def foreseen_text(error: Exception) -> str | None:
    """What to tell of an error that is the user's to mend, though it is no SpesError; None of a fault of ours."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {cause_of(error)}"
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        return cause_of(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: {_first_line(error)}"
    return None


def summary_of(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {_first_line(error)}"


def fault_text(summary: str, trace: str) -> str:
    """What to tell of a fault of this program, whose traceback is written to a file, or follows where none can be."""
    said = f"this is a fault of spes-mega {__version__}: {summary}"
    facts = f"spes-mega {__version__}, Python {sys.version}\n{sys.argv!r}\n\n"
    try:
        fd, path = tempfile.mkstemp(prefix="spes-mega-fault-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(facts + trace)
    except OSError:
        return f"{said}\n{trace}This traceback belongs into a report of the fault."
    return f"{said}; please report it with {path}, which has the traceback and the command line"


def _cut(line: str) -> str:
    """A line without the middle of what is too long to be read, such as a name of a million characters."""
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} … {line[-MAX_LINE // 2 :]}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
