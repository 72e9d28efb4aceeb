"""Pushes on their way into a round: streamed to a file, checked, and committed by a rename."""

import filecmp
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_mega.errors import HubRefusedError, StoreError
from spes_mega.hub.faults import PayloadError
from spes_mega.hub.forms import Forms, data_bytes, header_limit
from spes_mega.hub.payload import ChunkSink, StoredPayload
from spes_mega.hub.proto import hub_pb2 as pb
from spes_mega.hub.protocol import TOKENS_KEY
from spes_mega.hub.store import sync_directory

_STAGED = re.compile(r"node-(\d{3,})\.safetensors")
MAX_TOKENS = 10**15
Commit = Callable[[Callable[[], object]], None]


class Staging:
    """The pushes of the open round, as files in one directory."""

    def __init__(self, directory: Path, forms_of: Callable[[int], Forms]) -> None:
        """`forms_of(node)` gives the names, shapes and codecs of what a node has to push."""
        self._directory = directory
        self._forms_of = forms_of
        self._lock = threading.Lock()
        self._checking = threading.Lock()  # one check at a time, so that memory does not grow with the nodes

    def path(self, node: int) -> Path:
        return self._directory / f"node-{node:03d}.safetensors"

    def receive(
        self,
        node: int,
        opening: pb.PushOpening,
        chunks: Iterable[pb.Chunk],
        progress: Callable[[int], None],
        commit: Commit,
    ) -> bool:
        """Take one push; returns whether the same bytes were there already.

        `progress` is told of bytes as they come, and raises if the round has been closed; `commit` gets the rename
        that makes the push part of the round, and carries it out, or raises likewise.

        Raises:
            PayloadError: anything is wrong with the payload; nothing is left of it.
            HubRefusedError: another payload of this node was committed in this round.
            StoreError: the disk is full.
        """
        forms = self._forms_of(node)
        self._check_opening(opening, forms)
        with self._partial(node, progress) as part:
            self._write(part, opening, chunks, progress)
            with self._checking:
                self._check(part, node, forms)
            with self._lock:
                return self._commit(part, node, commit)

    def _check_opening(self, opening: pb.PushOpening, forms: Forms) -> None:
        least = data_bytes(forms)
        most = least + header_limit(forms)
        if not least < opening.total_bytes <= most:
            raise PayloadError(
                f"a push of {opening.total_bytes} bytes: the tensors of this node take {least}, with their header "
                f"at most {most}"
            )

    @contextmanager
    def _partial(self, node: int, progress: Callable[[int], None]) -> Iterator[Path]:
        # Several attempts may be under way at once (a broken one that gRPC has not noticed yet): each has its file.
        part = self._directory / f"node-{node:03d}.{secrets.token_hex(4)}.part"
        try:
            yield part
        except OSError as e:
            progress(0)  # the directory of a closed round is removed under a late push
            raise StoreError(f"the hub cannot store this push: {e.strerror or e}") from e
        finally:
            part.unlink(missing_ok=True)

    def _write(
        self, part: Path, opening: pb.PushOpening, chunks: Iterable[pb.Chunk], progress: Callable[[int], None]
    ) -> None:
        with part.open("xb") as file:
            sink = ChunkSink(file, opening.total_bytes)
            for chunk in chunks:
                progress(sink.take(chunk))
            sink.finish()
            os.fsync(file.fileno())

    def _check(self, part: Path, node: int, forms: Forms) -> None:
        payload = StoredPayload.open(part, f"push of node {node}", header_limit(forms))
        try:
            payload.check(forms)
            tokens_of(payload)
            payload.check_finite()
        finally:
            payload.close()

    def _commit(self, part: Path, node: int, commit: Commit) -> bool:
        target = self.path(node)
        if target.exists():
            if filecmp.cmp(part, target, shallow=False):
                return True
            raise HubRefusedError(f"node {node} has already pushed other values in this round; the first ones stay")
        commit(lambda: part.rename(target))
        sync_directory(self._directory)
        return False

    def committed(self, reject: Callable[[int, str], None]) -> dict[int, int]:
        """Nodes whose push is there after a restart, and its bytes; a damaged one is removed and given to `reject`."""
        sizes = {}
        for path in self._directory.iterdir():
            if match := _STAGED.fullmatch(path.name):
                node = int(match[1])
                try:
                    self._check(path, node, self._forms_of(node))
                    sizes[node] = path.stat().st_size
                except PayloadError as e:
                    path.unlink()
                    reject(node, f"damaged on the hub's disk: {e}")
        return sizes

    def open(self, node: int) -> StoredPayload:
        """The committed push of a node."""
        return StoredPayload.open(self.path(node), f"push of node {node}")


def tokens_of(payload: StoredPayload) -> int:
    """How many tokens the node says it trained on. Raises PayloadError unless it is a number."""
    text = payload.header.metadata.get(TOKENS_KEY, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= MAX_TOKENS):
        raise PayloadError(f"metadata {TOKENS_KEY!r} is not a number of tokens: {text[:40]!r}")
    return int(text)
