"""Uploads that are not complete yet, so that one that broke goes on where it stopped.

They are kept while their round is open, at most two of a node. A hub that is started again begins without them.
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from spes_mega.errors import HubRefusedError
from spes_mega.layout.storage.checksums import ArrivingChecksums
from spes_mega.layout.storage.write_behind import WriteBehind
from spes_mega.wire.errors import BrokenTransferError, BusyError, DamagedError, PayloadError
from spes_mega.wire.frames import PREFIX_BYTES, Arrival
from spes_mega.wire.proto import hub_pb2 as pb

MAX_UPLOADS = 2
"""Payloads of one node at a time. One is the rule; more come only from a node that pushes from two threads."""
MAX_ID_LENGTH = 64
_WRITTEN_AT_ONCE = 8 << 20


class Upload:
    """One payload on its way: its file, how much of it is there, and the attempt that may write to it."""

    def __init__(self, path: Path, total_bytes: int, max_header: int) -> None:
        """The file is made, unless it is there with what nobody needs any more."""
        self.path = path
        self.done = False
        self.lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._write_behind = WriteBehind(drop=False)
        self._started = 0
        self._checksums = ArrivingChecksums(max_header)
        self._end_other: Callable[[], None] | None = None
        self._attempt = 0
        try:
            os.ftruncate(self._fd, total_bytes)
            os.posix_fallocate(self._fd, 0, total_bytes)  # a full disk is found out before anything is sent
            self.arrival = Arrival(self._fd, total_bytes)
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether an attempt is under way."""
        return self._end_other is not None

    def begin(self, offset: int, end: Callable[[], None]) -> int:
        """An attempt begins, and ends an older one; returns its number. Raises BrokenTransferError at a gap."""
        with self.lock:
            if self.done:
                return self._attempt
            if self._fd < 0 or offset > self.arrival.received:
                raise BrokenTransferError(f"of this payload only {self.arrival.received} bytes are here")
            if self._end_other is not None:
                self._end_other()
            self._end_other = end
            self._attempt += 1
            self.arrival.received = offset
            self._started = min(self._started, offset)
            return self._attempt

    def end(self, attempt: int) -> None:
        """An attempt is over, in whatever way."""
        with self.lock:
            if attempt == self._attempt:
                self._end_other = None

    def take(self, attempt: int, frame: bytes) -> int:
        """Write one frame; returns its bytes. Raises what `Arrival.take` does, BrokenTransferError if overtaken."""
        with self.lock:
            self.check_attempt(attempt)
            count = self.arrival.take(frame)
            data = memoryview(frame)[PREFIX_BYTES:]
            self._checksums.arrived(self._fd, self.arrival.received - count, data)
            if self.arrival.received - self._started >= _WRITTEN_AT_ONCE:
                self._write_behind.wrote(self._fd, self._started, self.arrival.received - self._started)
                self._started = self.arrival.received
            return count

    @contextmanager
    def complete(self, attempt: int) -> Iterator["Upload | None"]:
        """Make all bytes durable, and hold the lock while they are checked and committed inside; see `Attempt`."""
        with self.lock:
            if self.done:
                yield None
                return
            self.check_attempt(attempt)
            self.arrival.finish()
            os.fsync(self._fd)
            yield self
            self.done = True
            self.remove()

    def checksum(self) -> str:
        """Return the checksum of the complete file, which has to be well-formed."""
        return self._checksums.of_file(self._fd, "push")

    def check_attempt(self, attempt: int) -> None:
        if self._fd < 0 or attempt != self._attempt:
            raise BrokenTransferError("this upload was given up, or a newer attempt has taken over")

    def remove(self) -> None:
        """Close the file, and remove it unless it has got another name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.path.unlink(missing_ok=True)


class Attempt:
    """One attempt at sending a payload, or the rest of it."""

    def __init__(self, upload: Upload, number: int) -> None:
        self._upload = upload
        self._number = number

    def take(self, frame: bytes) -> int:
        """Write one frame; return its bytes. Raise what `Upload.take` does."""
        return self._upload.take(self._number, frame)

    def complete(self) -> AbstractContextManager[Upload | None]:
        """Make all bytes durable; inside, the upload can be checked and committed. None: an older attempt has done it.

        The file is removed at the end unless it has got another name.

        Raises:
            PayloadError: bytes are missing.
            BrokenTransferError: a newer attempt has taken over.
        """
        return self._upload.complete(self._number)


class Uploads:
    """The uploads of one round, by node and by the payload's id, which the node has drawn."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._spares: list[Path] = []
        self._uploads: dict[tuple[int, str], Upload] = {}
        self._lock = threading.Lock()

    def add_spares(self, spares: Iterable[Path]) -> None:
        """Files in the directory that nobody needs any more: overwriting them is several times as fast as writing new
        ones, whose pages have to be made first."""
        with self._lock:
            self._spares += spares

    def held(self, node: int, payload: str) -> tuple[int, bool]:
        """How many bytes of a payload are here, and whether it is part of its round already."""
        with self._lock:
            upload = self._uploads.get((node, payload))
        return (upload.arrival.received, upload.done) if upload else (0, False)

    @contextmanager
    def attempt(
        self, node: int, opening: pb.PushOpening, max_header: int, cancel: Callable[[], None]
    ) -> Iterator[Attempt]:
        """Begin an attempt at a payload; `cancel` is called when another attempt takes over.

        An upload that is refused leaves nothing; one that breaks off, or arrives damaged, stays to be resumed.

        Raises:
            BrokenTransferError: it wants to resume from a byte that is not here.
            BusyError: the node has too many uploads at once.
        """
        upload = self._find(node, opening.payload, opening.total_bytes, max_header)
        number = upload.begin(opening.offset, cancel)
        try:
            yield Attempt(upload, number)
        except (DamagedError, BrokenTransferError):
            raise
        except HubRefusedError:
            self._drop(upload)
            raise
        finally:
            upload.end(number)

    def _find(self, node: int, payload: str, total_bytes: int, max_header: int) -> Upload:
        if not 0 < len(payload) <= MAX_ID_LENGTH:
            raise PayloadError(f"the id of a payload has 1 to {MAX_ID_LENGTH} characters")
        with self._lock:
            found = self._uploads.get((node, payload))
            if found is None:
                self._make_room(node)
                path = self._directory / f"node-{node:03d}.{secrets.token_hex(4)}.part"
                if self._spares:
                    self._spares.pop().rename(path)
                found = self._uploads[node, payload] = Upload(path, total_bytes, max_header)
            elif found.arrival.total != total_bytes:
                raise PayloadError(f"a payload of {total_bytes} bytes, but {found.arrival.total} were announced first")
            return found

    def _make_room(self, node: int) -> None:
        mine = {key: upload for key, upload in self._uploads.items() if key[0] == node}
        if len(mine) < MAX_UPLOADS:
            return
        idle = next((key for key, upload in mine.items() if not upload.active), None)
        if idle is None:
            raise BusyError(f"node {node} has {MAX_UPLOADS} uploads under way")
        removed = self._uploads.pop(idle)
        with removed.lock:
            removed.remove()

    def _drop(self, upload: Upload) -> None:
        """An upload that is refused leaves nothing."""
        with self._lock:
            self._uploads = {key: kept for key, kept in self._uploads.items() if kept is not upload}
        with upload.lock:
            upload.remove()

    def close(self) -> None:
        """The round is over: whatever came late is not wanted any more."""
        with self._lock:
            uploads, self._uploads = list(self._uploads.values()), {}
        for upload in uploads:
            with upload.lock:
                upload.remove()
