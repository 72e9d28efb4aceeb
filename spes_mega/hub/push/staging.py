"""The pushes of one round, as files in one directory: committed by a rename, read once when the round closes."""

import filecmp
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spes_mega.errors import HubRefusedError, NoSpaceError, SpesError, StoreError
from spes_mega.files.durable import sync_path
from spes_mega.hub.push.check import Expected, well_formed
from spes_mega.hub.push.uploads import Uploads
from spes_mega.hub.state.state_folder import STAGED
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.payload import StoredPayload


class DamagedPushError(StoreError):
    """The hub's disk has damaged a push after it was taken."""

    def __init__(self, node: int, path: Path, reason: object) -> None:
        super().__init__(f"{path}: damaged on the hub's disk: {reason}")
        self.node = node


class Staging:
    """Hold the pushes of a round. `lock` protects which files have the names of committed pushes."""

    def __init__(self, directory: Path, expected: Callable[[int], Expected]) -> None:
        """Take pushes into `directory`; `expected(node)` says what a node has to push."""
        self.lock = threading.Lock()
        self.uploads = Uploads(directory)
        self.directory = directory
        self.expected = expected

    def path(self, node: int) -> Path | None:
        """Return the committed push of a node, with its checksum in its name, so that both appear at once."""
        return next(self.directory.glob(f"node-{node:03d}-*.safetensors"), None)

    def has(self, node: int, part: Path, checksum: str) -> bool:
        """Tell whether the push in `part` is committed already; `lock` has to be held.

        Raises:
            HubRefusedError: another push of this node is.
        """
        if (earlier := self.path(node)) is None:
            return False
        if earlier == self._target(node, checksum) and filecmp.cmp(part, earlier, shallow=False):
            return True
        raise HubRefusedError(f"node {node} has already pushed other values in this round; the first ones stay")

    def commit(self, node: int, part: Path, checksum: str) -> None:
        """Give a push its final name; `lock` has to be held, and `sync` makes it durable."""
        part.rename(self._target(node, checksum))

    def sync(self) -> None:
        """Make renames durable."""
        sync_path(self.directory)

    def _target(self, node: int, checksum: str) -> Path:
        return self.directory / f"node-{node:03d}-{checksum}.safetensors"

    def drop(self, node: int) -> None:
        """Remove the committed push of a node, which is not to be used."""
        with self.lock:
            if path := self.path(node):
                path.unlink()
                self.sync()

    def committed(self) -> tuple[dict[int, int], dict[int, str]]:
        """Return the nodes whose push is there after a restart, and its bytes; and those whose is damaged, and how."""
        sizes, damaged = {}, {}
        for path in self.directory.iterdir():
            if match := STAGED.fullmatch(path.name):
                node = int(match[1])
                try:
                    with well_formed(path, self.expected(node)) as payload:
                        payload.check_sum(match[2])
                        sizes[node] = payload.size
                except (OSError, PayloadError) as e:
                    damaged[node] = f"damaged on the hub's disk: {e}"
        return sizes, damaged

    def open(self, node: int) -> StoredPayload:
        """Open the committed push of a node, to be read once; see `checking`. Raise DamagedPushError."""
        path = self.path(node)
        if path is None:
            raise DamagedPushError(node, self.directory, f"the push of node {node} has gone")
        try:
            return StoredPayload.open(path, f"push of node {node}", summed=True)
        except (OSError, PayloadError) as e:
            raise DamagedPushError(node, path, e) from e

    @contextmanager
    def checking(self, pushes: Mapping[int, StoredPayload]) -> Iterator[None]:
        """Raise DamagedPushError if what was read of a push inside is not what its node has sent, also where the work
        has failed, which may be because of that."""
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
            raise DamagedPushError(node, path or self.directory, e) from e

    def take_over(self, other: "Staging") -> None:
        """Let pushes overwrite those of the round before, now that the state is durable that was made of them.

        They get names that a restart sweeps. Should a crash bring the old names back, with the content of this round,
        then in the directory of a round that is over.
        """
        spares = []
        with other.lock:  # nobody compares a late push with one of them
            for path in list(other.directory.iterdir()):
                if STAGED.fullmatch(path.name):
                    spares.append(path.rename(self.directory / f"{path.stem}.spare"))
        self.uploads.add_spares(spares)

    def close(self) -> None:
        """End the round: nothing is kept but what was committed."""
        self.uploads.close()
