"""Which tokens a rank of a node trains on: a pure function of recipe, node, rank and the samples done before.

The token stream of an indexed dataset is cut into windows of seq_len + 1 tokens that overlap by one.
Window w belongs to node w mod num_nodes (`sharding: shared`), or all windows belong to the node (`own`).
An epoch goes through a node's windows in an order of its own.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spes_mega.data.dataset_files import training_data
from spes_mega.data.dataset_record import fingerprint
from spes_mega.data.permutation import Permutation
from spes_mega.data.token_stream import Tokens, TokenStream
from spes_mega.errors import DataError
from spes_mega.recipe import Recipe


@dataclass(frozen=True)
class DataIdentity:
    """A dataset and how it is shared out, wherever it lies."""

    num_tokens: int
    index_sha256: str
    sharding: str
    contents: str | None = None
    """The fingerprint of the tokens; None in checkpoints of earlier versions."""

    @property
    def text(self) -> str:
        contents = "" if self.contents is None else f" and contents {self.contents[:12]}"
        index = f"index {self.index_sha256[:12]}{contents}"
        return f"a dataset of {self.num_tokens:,} tokens with {index}, data.sharding {self.sharding}"

    def is_as_in(self, earlier: "DataIdentity") -> bool:
        """Whether it is the dataset of before, as far as an earlier version recorded that."""
        return replace(self, contents=self.contents if earlier.contents is not None else None) == earlier


class NodeData:
    """The samples of one rank of one node. `rank` and `ranks` count the node's own data-parallel ranks."""

    def __init__(self, recipe: Recipe, node: int, rank: int = 0, ranks: int = 1) -> None:
        """Raises DataError: no dataset is named, it cannot be read, or it has no window for this node."""
        self.stream = TokenStream(training_data(recipe))
        train, shared = recipe.train, recipe.data.sharding == "shared"
        self.seq_len, self.vocab_size, self.seed = train.seq_len, recipe.model.vocab_size, train.seed
        self.micro_batch_size, self.accumulation = train.micro_batch_size, train.accumulation(ranks)
        self.rank, self.ranks, self.sharding = rank, ranks, recipe.data.sharding
        self.first, self.stride = (node, recipe.spes.num_nodes) if shared else (0, 1)
        windows = max(0, self.stream.num_tokens - 1) // self.seq_len
        self.num_windows = max(0, -(-(windows - self.first) // self.stride))
        if not self.num_windows:
            raise DataError(
                f"{self.stream.prefix}: {self.stream.num_tokens} tokens make {windows} windows of seq_len "
                f"{self.seq_len} + 1 tokens, none of them for node {node}: use more data or a shorter train.seq_len"
            )
        self._order = (-1, Permutation(1, ""))
        self._identity: DataIdentity | None = None

    def identity(self) -> DataIdentity:
        """Return what the dataset is known by; its files are read the first time. Raises DataError: they cannot be."""
        if self._identity is None:
            self._identity = self._read_identity()
        return self._identity

    def _read_identity(self) -> DataIdentity:
        path = Path(f"{self.stream.prefix}.idx")
        try:
            with path.open("rb") as file:
                index = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as e:
            raise DataError(f"{path}: cannot read: {e.strerror}") from e
        contents = fingerprint(Path(f"{self.stream.prefix}.bin"))
        return DataIdentity(self.stream.num_tokens, index, self.sharding, contents)

    def check_tokens(self, advance: Callable[[int], None]) -> None:
        """Raise DataError if a token id is outside the model's vocabulary; see `TokenStream.check_all_below`."""
        self.stream.check_all_below(self.vocab_size, advance)

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks of the node take in one optimizer step."""
        return self.ranks * self.micro_batch_size * self.accumulation

    def batch(self, done: int, micro_step: int) -> Tokens:
        """int64 [micro_batch_size, seq_len + 1] for forward pass `micro_step` (from 0) of this rank in one step.

        `done` samples were trained on before that step, by all ranks, with whatever batches.

        Raises DataError: a token id is outside the model's vocabulary.
        """
        first = done + (self.rank * self.accumulation + micro_step) * self.micro_batch_size
        return np.stack([self.sample(first + i) for i in range(self.micro_batch_size)])

    def sample(self, number: int) -> Tokens:
        """int64 [seq_len + 1]: the node's sample `number`, counted from 0 through all epochs."""
        start = self.window(number) * self.seq_len
        return self.stream.read_below(start, self.seq_len + 1, self.vocab_size)

    def window(self, number: int) -> int:
        """Global window that sample `number` of this node is."""
        epoch, position = divmod(number, self.num_windows)
        if self._order[0] != epoch:
            # `own` data has the same order on every node, so that equal files mean equal training.
            self._order = (epoch, Permutation(self.num_windows, f"{self.seed}/{epoch}/{self.first}"))
        return self.first + self.stride * self._order[1][position]
