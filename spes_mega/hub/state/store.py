"""The hub's state directory: a durable log of rounds.

    run.json                     which run this is
    lock                         held by the hub that uses the directory
    drain                        there if the hub was asked to end after the open round
    members.json                 which nodes take part
    rounds/000007/               a committed state: a Hugging Face directory, and more (see published.py)
    rounds/000007/round.json     the ledger
    rounds/000007/checksums.json of all files of the state
    rounds/.000005.partial-spare/   files of a state that was removed, to be overwritten by those of the next one
    metrics.jsonl                figures of all rounds
    pushes/000007/node-001-0123456789abcdef.safetensors   a committed push for the open round, and its checksum
    pushes/000007/closing.json   with which pushes the round is closed: until the next state is on the disk, it can be
                                 made anew from them
    pushes/000007/*.spare        pushes of the round before, to be overwritten by those of the open one
    snapshots/round-000007/      kept for good

What has its final name is complete and on the disk; everything else is removed when a hub has opened the directory and
found what it needs whole. members.json and closing.json hold their own checksum.
"""

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spes_mega.errors import CheckpointError, StoreError
from spes_mega.files.durable import sync_path
from spes_mega.hub.rounds import members as members_format
from spes_mega.hub.rounds.members import Member, Members
from spes_mega.hub.state.checksummed import read_json, read_sealed, write_sealed, write_text
from spes_mega.hub.state.cleanup import numbers, remove_leftovers, remove_old, spare_files
from spes_mega.hub.state.closing_note import read_closing
from spes_mega.hub.state.disk_full import noticing_shortage
from spes_mega.hub.state.drain import REQUEST
from spes_mega.hub.state.ledger import Ledger, RoundRecord
from spes_mega.hub.state.round_state import BESIDE, Published
from spes_mega.hub.state.run_lock import take_lock
from spes_mega.hub.state.state_folder import PARTS, check_layout, check_own, naming
from spes_mega.layout.storage.checksums import CHECKSUMS, check_files, require
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.recipe import Recipe
from spes_mega.recipe.agreement import differences, may_go_on, told
from spes_mega.wire.policy import WirePolicy

FORMAT = 1
_RESTORE = "restore the state directory from a copy"


@dataclass(frozen=True)
class Template:
    """What the state of a round takes over from another model directory."""

    config: dict[str, Any] | None = None
    """Its config.json, whose further fields are kept."""
    folder: Path | None = None
    """The directory whose tokenizer and other small files are copied."""


class Draft:
    """The state of a round while it is written."""

    def __init__(self, round_: int, writer: CheckpointWriter, pending: dict[int, Path]) -> None:
        """Let `complete` note in `pending` where the state can be opened before it has its final name."""
        self.writer = writer
        self._round = round_
        self._pending = pending

    def complete(self, ledger: Ledger) -> None:
        """Keep the ledger with the tensors, all of which are written: from now on the state can be opened."""
        content = {"format": FORMAT, "round": self._round, "ledger": ledger.as_json()}
        self.writer.write_text("round.json", json.dumps(content, indent=1))
        self._pending[self._round] = self.writer.complete()


class Store:
    """Opens (or makes) a state directory and holds its lock until `close`."""

    def __init__(self, root: Path, recipe: Recipe, change: Collection[str] = ()) -> None:
        """Open `root`, whose run may have had other values of the fields in `change`.

        Raises StoreError: another run's or another hub's directory, or one that cannot be used.
        """
        self.root = root
        self._recipe = recipe
        self._policy = WirePolicy(recipe.spes)
        self._pending: dict[int, Path] = {}
        with naming(root):
            check_own(root)
            check_layout(root, recipe.spes.num_nodes)
            for part in PARTS:
                (root / part).mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(root)
            try:
                self._check_run(change)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        with suppress(OSError):
            (self.root / REQUEST).unlink(missing_ok=True)
        os.close(self._lock)

    def drain_requested(self) -> bool:
        """Whether `spes-mega hub --drain` was called for this directory."""
        return (self.root / REQUEST).exists()

    def answer_drain(self) -> None:
        """Let `spes-mega hub --drain` see that the hub is alive."""
        with suppress(OSError):
            os.utime(self.root / REQUEST)

    def newest(self) -> int | None:
        """Number of the newest committed state; None in a new directory."""
        return max(numbers(self.root / "rounds"), default=None)

    def round_dir(self, round_: int) -> Path:
        return self.root / "rounds" / f"{round_:06d}"

    def pushes_dir(self, round_: int) -> Path:
        """Where the pushes for an open round are staged; made if it is not there."""
        path = self.root / "pushes" / f"{round_:06d}"
        path.mkdir(exist_ok=True)
        return path

    def open_state(self, round_: int) -> Published:
        """Raises CheckpointError or StoreError: a file is missing or damaged."""
        directory = self.round_dir(round_)
        if (pending := self._pending.get(round_)) and not directory.exists():
            try:
                return Published(pending, round_, self._policy)
            except (CheckpointError, StoreError):
                if not directory.exists():
                    raise  # else it got its final name just now
        return Published(directory, round_, self._policy)

    def check_new(self) -> None:
        """Raises StoreError if there is no state, and yet what follows on one: states were lost."""
        traces = [self.root / "members.json", *self.root.glob("pushes/*/node-*"), *self.root.glob("snapshots/round-*")]
        if found := next((path for path in traces if path.exists()), None):
            raise StoreError(
                f"{self.root / 'rounds'}: holds no state, but {found} is there, so that there was one: {_RESTORE}, or "
                "give --state an empty directory to begin a new run"
            )

    def check_state(self, round_: int) -> None:
        """Raises StoreError naming the first damaged file of a state, and what can be done."""
        try:
            checked = check_files(directory := self.round_dir(round_))
            require((file.name for file in directory.glob("*.safetensors")), checked, directory)
            require(("round.json", "config.json"), checked, directory)
            self.open_state(round_).close()
        except CheckpointError as e:
            raise StoreError(f"{e}. {self._advice(round_)}") from e

    def _advice(self, round_: int) -> str:
        restore = "Restore the state directory from a copy"
        earlier = max((number for number in numbers(self.root / "rounds") if number < round_), default=None)
        try:
            if earlier is None:
                return f"{restore}; no earlier round is kept"
            check_files(self.round_dir(earlier))
        except CheckpointError as e:
            return f"{restore}; round {earlier} is damaged too ({e})"
        return (
            f"{restore}, or remove {self.round_dir(round_)} and start again: round {earlier} is whole, the run goes "
            "back to it, and nodes that are running have to be started again"
        )

    def read_ledger(self, round_: int) -> Ledger:
        """Raises StoreError if round.json is damaged."""
        path = self.round_dir(round_) / "round.json"
        try:
            raw = read_json(path, _RESTORE)
            ledger = Ledger.from_json(raw["ledger"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise StoreError(f"{path}: damaged: {e!r}; {_RESTORE}") from e
        if raw.get("round") != round_ or not ledger.rounds or ledger.rounds[-1].round != round_:
            raise StoreError(f"{path}: speaks of another round than its directory's name")
        return ledger

    def read_members(self) -> dict[int, Member]:
        """The nodes that took part when the directory was last used. Raises StoreError if members.json is damaged."""
        path, remedy = self.root / "members.json", "remove it, and all nodes have to join anew"
        try:
            members = members_format.from_json(read_sealed(path, remedy))
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as e:
            raise StoreError(f"{path}: damaged: {e!r}; {remedy}") from e
        if strangers := sorted(set(members) - set(range(self._recipe.spes.num_nodes))):
            raise StoreError(f"{path}: speaks of node {strangers[0]}, which this run does not have; remove it")
        return members

    def write_members(self, members: Members) -> None:
        """Raises StoreError if the directory cannot be written."""
        path = self.root / "members.json"
        try:
            with noticing_shortage(path):
                write_sealed(path, members_format.as_json(members))
        except OSError as e:
            raise StoreError(f"{path}: the hub cannot note who takes part: {e.strerror or e}") from e

    @contextmanager
    def committing(self, round_: int, template: Template, beside: int = 0) -> Iterator[Draft]:
        """Write the state of a round inside, tensors first, then `Draft.complete`; it is durable at the end.

        `beside` is the size of what lies beside the weights, in bytes.
        """
        with (
            noticing_shortage(self.root),
            CheckpointWriter(
                self.round_dir(round_),
                self._recipe.model,
                torch.float32,
                base_config=template.config,
                copy_from=template.folder,
                metadata={"round": str(round_)},
                checksums=True,
                beside=beside,
                spares=spare_files(self.root),
            ) as writer,
        ):
            yield Draft(round_, writer, self._pending)
        del self._pending[round_]

    def prune(self, newest: int, last: bool = False) -> None:
        """Remove states and pushes that nobody needs any more, but for files that the next state can overwrite.

        `last`: no state will follow.
        """
        closing = read_closing(self.root / "pushes" / f"{newest:06d}") is not None
        # Nodes may be further than the disk.
        remove_old(self.root, newest, {newest, newest + 1} if closing else {newest}, last)

    def sweep(self) -> None:
        """Remove what a crash left half-written, once it is known that the rest is whole."""
        remove_leftovers(self.root)
        newest = self.newest()
        if newest is not None:
            self.prune(newest)

    def snapshot(self, record: RoundRecord, always: bool = False) -> Path | None:
        """Keep a committed state for good if the recipe asks for it; returns its directory if it is new.

        `always`: also if it does not, but for the initial state, which somebody has.

        Files are hard links where the file system has them, so that a snapshot takes no time and little space.
        """
        due = record.round == self._recipe.num_rounds or record.round % self._recipe.spes.snapshot_every == 0
        target = self.root / "snapshots" / f"round-{record.round:06d}"
        if target.exists() or not (record.round and (always or due)):
            return None
        partial = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        try:
            for file in self.round_dir(record.round).iterdir():
                if file.name not in ("round.json", CHECKSUMS, *BESIDE):
                    _link(file, partial / file.name)
            sync_path(partial)
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial)
            raise
        sync_path(target.parent)
        return target

    def _check_run(self, change: Collection[str]) -> None:
        path = self.root / "run.json"
        mine: dict[str, Any] = {"format": FORMAT, "name": self._recipe.name, "digest": self._recipe.digest()}
        mine["agreed"] = self._recipe.agreed()
        if not path.exists():
            if self.newest() is not None:
                raise StoreError(f"{path}: missing beside committed rounds; restore it from a copy")
            write_text(path, json.dumps(mine, indent=1))
            return
        found = read_json(path, "restore it from a copy")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise StoreError(f"{path}: not a state directory of format {FORMAT}")
        if found.get("digest") != mine["digest"]:
            # without a state the first start failed, say at an --init of another shape
            if self.newest() is not None:
                self._check_changes(found, change)
            write_text(path, json.dumps(mine, indent=1))

    def _check_changes(self, found: dict[str, Any], change: Collection[str]) -> None:
        """Raise StoreError unless the state is of this recipe, but for fields in `change`."""
        its, mine = found.get("agreed"), self._recipe
        known = isinstance(its, dict)
        fields = differences(its, mine.agreed()) if isinstance(its, dict) else {}
        if known and may_go_on(fields, change):
            return
        what = told(fields, "state")
        what = what or f"digest {str(found.get('digest'))[:12]}; this one is {mine.name}, {mine.digest()[:12]}"
        raise StoreError(
            f"{self.root}: holds the rounds of another recipe ({found.get('name')}: {what}): choose another --state, "
            "or start with the recipe that it belongs to"
        )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_path(target)
