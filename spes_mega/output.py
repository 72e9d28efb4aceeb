"""Standard output and standard error of a command: any terminal's encoding, and what cannot be written."""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from spes_mega.errors import SpesError, cause_of


class OutputError(SpesError):
    """Standard output cannot be written."""


class ReaderGone(Exception):
    """Whoever read standard output has had enough, as `head`; no error worth a line."""

    exit_code = 128 + 13
    """As of a program that SIGPIPE ended."""


class GuardedStream:
    """A text stream that hands its write errors to `failed`, which may raise another error, or ignore them."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as e:
            self._failed(e)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as e:
            self._failed(e)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write there, past this guard
            raise AttributeError(name)
        return getattr(self._stream, name)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Within, no character is one too many for the terminal's encoding, and write errors are told apart from others.

    Those of stdout raise OutputError or ReaderGone, those of stderr are ignored. Standard streams that are closed are
    opened on /dev/null: else the next file would get their numbers, and what a library prints would end up in it.
    """
    _occupy_closed_descriptors()
    out, err = sys.stdout, sys.stderr
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _guarded(out, _raise), _guarded(err, lambda error: None)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        _discard_unwritable(out)
        _discard_unwritable(err)


def outlive_output() -> None:
    """Within `standard_streams`: ignore write errors of stdout too, but for a line on stderr at the first one.

    For processes whose work does not need a reader.
    """
    told = False

    def tell(error: OSError) -> None:
        nonlocal told
        if not told:
            told = True
            sys.stderr.write(f"standard output cannot be written ({cause_of(error)}); going on without it\n")
            sys.stderr.flush()

    inner = sys.stdout._stream if isinstance(sys.stdout, GuardedStream) else sys.stdout
    sys.stdout = _guarded(inner, tell)


def _guarded(stream: TextIO, failed: Callable[[OSError], None]) -> TextIO:
    """None where Python has no such stream: it was closed, and nothing is written to it."""
    return cast(TextIO, stream and GuardedStream(stream, failed))


def _raise(error: OSError) -> None:
    if error.errno == errno.EPIPE:
        raise ReaderGone from error
    raise OutputError(f"standard output: cannot be written: {cause_of(error)}") from error


def _discard_unwritable(stream: TextIO | None) -> None:
    """Send what a stream still holds to /dev/null if it cannot be written: Python would fail on it at its end."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def _occupy_closed_descriptors() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
