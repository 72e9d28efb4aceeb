"""Errors that users see. Each kind has an exit code (docs/reference/exit-codes.md), for scripts to tell them apart.

A message names the file, key, node or tensor, says what was expected, and what to do.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SpesError(Exception):
    """Base of all errors that are reported to the user without a traceback."""

    exit_code = 1


class RecipeError(SpesError):
    """A recipe is malformed or contradicts itself, or options do not go with it or with each other."""

    exit_code = 3


class CheckpointError(SpesError):
    """A checkpoint cannot be read, converted or written."""

    exit_code = 4


class NoSpaceError(CheckpointError):
    """There is no room for a checkpoint on its disk."""


class DataError(SpesError):
    """Text, a tokenizer or an indexed dataset cannot be used."""

    exit_code = 5


class HubRefusedError(SpesError):
    """The hub refused a request: another recipe, token, round, name, shape, dtype or value."""

    exit_code = 6


class DeadlineError(SpesError):
    """Somebody did not come, or did not answer, in time."""

    exit_code = 7


class StoreError(SpesError):
    """The hub's state directory is damaged, full, or belongs to another run."""

    exit_code = 8


class StoreFullError(StoreError):
    """There is no room on the disk of the hub's state directory."""


class AccessError(SpesError):
    """Keys, a token, or an address on this machine's side cannot be used."""

    exit_code = 9


class VerificationError(SpesError):
    """A result that should equal its source does not: 1, as from cmp and diff."""

    exit_code = 1


@contextmanager
def system_errors(kind: type[SpesError], path: Path | str | None = None, doing: str = "") -> Iterator[None]:
    """Turn an OSError within into a `kind` that names the path and the system's reason. Also a decorator.

    Args:
        path: what to name; None: the path that the error itself has. An error without any is left as it is.
            A loop of symbolic links, which pathlib does not tell as an OSError, is named by itself.
        doing: such as "cannot be written".
    """
    try:
        yield
    except RuntimeError as e:
        if not str(e).startswith("Symlink loop"):
            raise
        raise kind(f"{e}: no path leads through it") from e
    except OSError as e:
        named = e.filename if path is None else path
        if named is None or e.errno is None:
            raise
        raise kind(f"{os.fsdecode(named)}: {doing + ': ' if doing else ''}{cause_of(e)}") from e


def cause_of(error: OSError) -> str:
    """The system's reason in its own words, without number and path."""
    return error.strerror or str(error) or type(error).__name__
