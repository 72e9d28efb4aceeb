"""Pushes on their way into a round: streamed to a file, checked, and committed by a rename."""

import filecmp
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_mega.errors import HubRefusedError, StoreError
from spes_mega.hub.faults import BrokenTransferError, DamagedError, PayloadError
from spes_mega.hub.forms import Forms, data_bytes, header_limit
from spes_mega.hub.partials import Partials
from spes_mega.hub.payload import StoredPayload
from spes_mega.hub.proto import hub_pb2 as pb
from spes_mega.hub.protocol import TOKENS_KEY
from spes_mega.hub.room import noticing_full
from spes_mega.hub.store import sync_directory
from spes_mega.recipe import Recipe

_STAGED = re.compile(r"node-(\d{3,})-([0-9a-f]{16})\.safetensors")
MAX_TOKENS = 10**15
MAX_SAMPLES_PER_STEP = 1 << 16
"""Of one node. What a node really takes is its own matter (train.micro_batch_size, train.grad_accumulation, its ranks),
so this is only far above what anybody trains with."""
Commit = Callable[[Callable[[], object]], None]


class Staging:
    """The pushes of the open round, as files in one directory."""

    def __init__(
        self,
        directory: Path,
        forms_of: Callable[[int], Forms],
        check_update: Callable[[int, StoredPayload], None] = lambda node, payload: None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """`forms_of(node)` gives the names, shapes and codecs of what a node has to push; `check_update(node, payload)`
        sees a push of finite values when it has come, and raises PayloadError if it is not wanted. A node may say that
        it trained on `max_tokens` at the most."""
        self._max_tokens = max_tokens
        self._check_update = check_update
        self._directory = directory
        self._forms_of = forms_of
        self._partials = Partials(directory)
        self._lock = threading.Lock()
        self._checking = threading.Lock()  # one check at a time, so that memory does not grow with the nodes

    def path(self, node: int) -> Path | None:
        """The committed push of a node, with its checksum in its name, so that both appear at once."""
        return next(self._directory.glob(f"node-{node:03d}-*.safetensors"), None)

    def offered(self, node: int, payload: str) -> tuple[int, bool]:
        """How many bytes of a payload are here, and whether it is committed."""
        return self._partials.held(node, payload)

    def receive(
        self,
        node: int,
        opening: pb.PushOpening,
        frames: Iterable[bytes],
        progress: Callable[[int], None],
        commit: Commit,
        end: Callable[[], None],
    ) -> bool:
        """Take one push, from where an earlier attempt broke; returns whether the same bytes were there already.

        `progress` is told of bytes as they come, and raises if the round has been closed; `commit` gets the rename
        that makes the push part of the round, and carries it out, or raises likewise. `end` is called when another
        attempt at the same payload begins.

        Raises:
            PayloadError: anything is wrong with the payload; nothing is left of it.
            DamagedError, BrokenTransferError: the transfer has to go on by another attempt.
            HubRefusedError: another payload of this node was committed in this round.
            StoreFullError: the disk is full.
            StoreError: it cannot be written.
        """
        self._check_opening(opening, self._forms_of(node))
        with self._storing(progress):
            partials = self._partials
            with partials.attempt(node, opening.payload, opening.total_bytes, opening.offset, end) as (upload, attempt):
                try:
                    for frame in frames:
                        progress(upload.take(attempt, frame))
                    return upload.finish(attempt, lambda part, sum_: self._take(part, sum_, node, commit))
                except (DamagedError, BrokenTransferError):
                    raise
                except HubRefusedError:
                    partials.drop(upload)
                    raise

    def close(self) -> None:
        """The round is over: nothing is kept but what was committed."""
        self._partials.close()

    def take_over(self, other: "Staging") -> None:
        """Let pushes overwrite those of the round before, now that the state is durable that was made of them.

        They get names that a restart sweeps. Should a crash bring the old names back, with the content of this round,
        then in the directory of a round that is over.
        """
        spares = []
        with other._lock:  # nobody compares a late push with one of them
            for path in list(other._directory.iterdir()):
                if _STAGED.fullmatch(path.name):
                    spares.append(path.rename(self._directory / f"{path.stem}.spare"))
        self._partials.add_spares(spares)

    def _check_opening(self, opening: pb.PushOpening, forms: Forms) -> None:
        least = data_bytes(forms)
        most = least + header_limit(forms)
        if not least < opening.total_bytes <= most:
            raise PayloadError(
                f"a push of {opening.total_bytes} bytes: the tensors of this node take {least}, with their header "
                f"at most {most}"
            )

    @contextmanager
    def _storing(self, progress: Callable[[int], None]) -> Iterator[None]:
        try:
            with noticing_full(self._directory):
                yield
        except OSError as e:
            progress(0)  # the directory of a closed round is removed under a late push
            raise StoreError(f"the hub cannot store this push: {e.strerror or e}") from e

    def _take(self, part: Path, checksum: str, node: int, commit: Commit) -> bool:
        with self._checking, self._checked(part, node) as payload:
            payload.check_finite()
            self._check_update(node, payload)
        with self._lock:
            return self._commit(part, checksum, node, commit)

    @contextmanager
    def _checked(self, part: Path, node: int) -> Iterator[StoredPayload]:
        forms = self._forms_of(node)
        payload = StoredPayload.open(part, f"push of node {node}", header_limit(forms))
        try:
            payload.check(forms)
            check_tokens(payload, self._max_tokens)
            yield payload
        finally:
            payload.close()

    def _commit(self, part: Path, checksum: str, node: int, commit: Commit) -> bool:
        target = self._directory / f"node-{node:03d}-{checksum}.safetensors"
        if earlier := self.path(node):
            if earlier == target and filecmp.cmp(part, target, shallow=False):
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
                    with self._checked(path, node) as payload:
                        payload.check_sum(match[2])
                        sizes[node] = payload.size
                except PayloadError as e:
                    path.unlink()
                    reject(node, f"damaged on the hub's disk: {e}")
        return sizes

    def open(self, node: int) -> StoredPayload:
        """The committed push of a node, which is there."""
        path = self.path(node)
        if path is None:
            raise StoreError(f"{self._directory}: the push of node {node} has gone")
        return StoredPayload.open(path, f"push of node {node}")


def tokens_of(payload: StoredPayload) -> int:
    """How many tokens the node says it trained on. Raises PayloadError unless it is a number."""
    text = payload.header.metadata.get(TOKENS_KEY, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= MAX_TOKENS):
        raise PayloadError(f"metadata {TOKENS_KEY!r} is not a number of tokens: {text[:40]!r}")
    return int(text)


def check_tokens(payload: StoredPayload, most: int) -> None:
    """Raises PayloadError if a node says that it trained on more than `most` tokens."""
    if (tokens := tokens_of(payload)) > most:
        raise PayloadError(
            f"metadata {TOKENS_KEY!r}: {tokens} tokens are more than a node trains on in a round ({most} at most: "
            f"spes.sync_every steps of {MAX_SAMPLES_PER_STEP} samples of train.seq_len)"
        )


def most_tokens(recipe: Recipe) -> int:
    """That a node can have trained on in a round, generously."""
    return min(MAX_TOKENS, recipe.spes.sync_every * MAX_SAMPLES_PER_STEP * recipe.train.seq_len)
