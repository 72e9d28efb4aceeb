"""Pushes on their way into a round: streamed to a file, checked, and committed by a rename."""

import filecmp
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spes_mega.errors import HubRefusedError, NoSpaceError, SpesError, StoreError
from spes_mega.hub.push.uploads import Partials
from spes_mega.hub.state.checksummed import sync_directory
from spes_mega.hub.state.disk_full import noticing_shortage
from spes_mega.hub.state.state_folder import STAGED
from spes_mega.quoting import quoted
from spes_mega.recipe import Recipe
from spes_mega.wire.errors import BrokenTransferError, DamagedError, PayloadError
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.protocol import TOKENS_KEY
from spes_mega.wire.tensor_specs import Forms, data_bytes, header_limit

MAX_TOKENS = 10**15
MAX_SAMPLES_PER_STEP = 1 << 16
"""Of one node. What a node really takes is its own matter (train.batch_size, or train.micro_batch_size,
train.grad_accumulation and its ranks), so this is only far above what anybody trains with."""
Commit = Callable[[Callable[[], object]], None]


class DamagedPushError(StoreError):
    """The hub's disk has damaged a push after it was taken."""

    def __init__(self, node: int, path: Path, reason: object) -> None:
        super().__init__(f"{path}: damaged on the hub's disk: {reason}")
        self.node = node


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
        forms = self._forms_of(node)
        self._check_opening(opening, forms)
        with self._storing(progress):
            partials, limit = self._partials, header_limit(forms)
            with partials.attempt(node, opening.payload, opening.total_bytes, limit, opening.offset, end) as (
                upload,
                attempt,
            ):
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
                if STAGED.fullmatch(path.name):
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
            with noticing_shortage(self._directory):
                yield
        except OSError as e:
            progress(0)  # the directory of a closed round is removed under a late push
            raise StoreError(f"the hub cannot store this push: {e.strerror or e}") from e

    def _take(self, part: Path, checksum: Callable[[], str], node: int, commit: Commit) -> bool:
        with self._checking, self._checked(part, node) as payload:
            payload.check_finite()
            self._check_update(node, payload)
        with self._lock:
            return self._commit(part, checksum(), node, commit)

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

    def committed(self) -> tuple[dict[int, int], dict[int, str]]:
        """Nodes whose push is there after a restart, and its bytes; and those whose push is damaged, and how."""
        sizes, damaged = {}, {}
        for path in self._directory.iterdir():
            if match := STAGED.fullmatch(path.name):
                node = int(match[1])
                try:
                    with self._checked(path, node) as payload:
                        payload.check_sum(match[2])
                        sizes[node] = payload.size
                except (OSError, PayloadError) as e:
                    damaged[node] = f"damaged on the hub's disk: {e}"
        return sizes, damaged

    def open(self, node: int) -> StoredPayload:
        """The committed push of a node, to be read once; see `checking`. Raises DamagedPushError."""
        path = self.path(node)
        if path is None:
            raise DamagedPushError(node, self._directory, f"the push of node {node} has gone")
        try:
            return StoredPayload.open(path, f"push of node {node}", summed=True)
        except (OSError, PayloadError) as e:
            raise DamagedPushError(node, path, e) from e

    @contextmanager
    def checking(self, pushes: Mapping[int, StoredPayload]) -> Iterator[None]:
        """Raises DamagedPushError if what was read of a push meanwhile is not what its node has sent, also where the
        work has failed, which may be because of that."""
        failure = None
        try:
            yield
        except NoSpaceError:
            raise
        except SpesError as e:
            failure = e
        for node, payload in pushes.items():
            self._check_read(node, payload)
        if failure is not None:
            raise failure

    def _check_read(self, node: int, payload: StoredPayload) -> None:
        path = self.path(node)
        match = STAGED.fullmatch(path.name) if path is not None else None
        try:
            payload.check_sum(match[2] if match else "")
        except PayloadError as e:
            raise DamagedPushError(node, path or self._directory, e) from e

    def drop(self, node: int) -> None:
        """The committed push of a node is not to be used."""
        with self._lock:
            if path := self.path(node):
                path.unlink()
                sync_directory(self._directory)


def tokens_of(payload: StoredPayload) -> int:
    """How many tokens the node says it trained on. Raises PayloadError unless it is a number."""
    text = payload.header.metadata.get(TOKENS_KEY, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= MAX_TOKENS):
        raise PayloadError(f"metadata {TOKENS_KEY!r} is not a number of tokens: {quoted(text, 40)}")
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
