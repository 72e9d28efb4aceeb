"""Which tokens a rank of a node trains on: a pure function of recipe, node, rank and step.

The token stream of an indexed dataset is cut into windows of seq_len + 1 tokens that overlap by one.
Window w belongs to node w mod num_nodes (`sharding: shared`), or all windows belong to the node (`own`).
An epoch goes through a node's windows in an order of its own.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import IndexedDataset

from spes_mega.errors import DataError
from spes_mega.node.permutation import Permutation
from spes_mega.recipe import Recipe

Tokens = npt.NDArray[np.int64]


class TokenStream:
    """All documents of an indexed dataset, one after the other."""

    def __init__(self, prefix: Path) -> None:
        """Raises DataError: there is no dataset at `prefix`, or its two files do not belong together."""
        self.prefix = prefix
        for suffix in (".idx", ".bin"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise DataError(f"{prefix}{suffix}: no such file; `spes-mega tokenize` writes indexed datasets")
        try:
            self._dataset = IndexedDataset(str(prefix))
        except (AssertionError, ValueError, KeyError) as e:
            raise DataError(f"{prefix}.idx: not the index of a Megatron-Core dataset: {e}") from e
        index = self._dataset.index
        self._dtype = np.dtype(index.dtype)
        self.num_tokens = int(np.sum(index.sequence_lengths, dtype=np.int64))
        size = Path(f"{prefix}.bin").stat().st_size
        if size != self.num_tokens * self._dtype.itemsize:
            raise DataError(
                f"{prefix}.bin: {size} bytes, but its index speaks of {self.num_tokens} tokens of "
                f"{self._dtype.itemsize} bytes: copied incompletely?"
            )

    def read(self, start: int, count: int) -> Tokens:
        """Tokens start..start+count-1 as int64."""
        reader = self._dataset.bin_reader
        raw = reader.read(dtype=self._dtype.type, count=count, offset=start * self._dtype.itemsize)
        return np.asarray(raw, dtype=np.int64)


class NodeData:
    """The samples of one rank of one node. `rank` and `ranks` count the node's own data-parallel ranks."""

    def __init__(self, recipe: Recipe, node: int, rank: int = 0, ranks: int = 1) -> None:
        """Raises DataError: no dataset is named, it cannot be read, or it has no window for this node."""
        if recipe.data.train is None:
            raise DataError("the recipe names no training data: set data.train to the prefix of an indexed dataset")
        self.stream = TokenStream(recipe.data.train)
        train, shared = recipe.train, recipe.data.sharding == "shared"
        self.seq_len, self.vocab_size, self.seed = train.seq_len, recipe.model.vocab_size, train.seed
        self.micro_batch_size, self.grad_accumulation = train.micro_batch_size, train.grad_accumulation
        self.rank, self.ranks = rank, ranks
        self.first, self.stride = (node, recipe.spes.num_nodes) if shared else (0, 1)
        windows = max(0, self.stream.num_tokens - 1) // self.seq_len
        self.num_windows = max(0, -(-(windows - self.first) // self.stride))
        if not self.num_windows:
            raise DataError(
                f"{self.stream.prefix}: {self.stream.num_tokens} tokens make {windows} windows of seq_len "
                f"{self.seq_len} + 1 tokens, none of them for node {node}: use more data or a shorter train.seq_len"
            )
        self._order = (-1, Permutation(1, ""))

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks of the node take in one optimizer step."""
        return self.ranks * self.micro_batch_size * self.grad_accumulation

    def batch(self, step: int, micro_step: int) -> Tokens:
        """int64 [micro_batch_size, seq_len + 1] for forward pass `micro_step` (from 0) of step `step` (from 1).

        Raises DataError: a token id is outside the model's vocabulary.
        """
        first = (step - 1) * self.samples_per_step
        first += (self.rank * self.grad_accumulation + micro_step) * self.micro_batch_size
        return np.stack([self.sample(first + i) for i in range(self.micro_batch_size)])

    def sample(self, number: int) -> Tokens:
        """int64 [seq_len + 1]: the node's sample `number`, counted from 0 through all epochs."""
        window = self.window(number)
        tokens = self.stream.read(window * self.seq_len, self.seq_len + 1)
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.stream.prefix}: token id {largest} is outside model.vocab_size {self.vocab_size}: "
                "tokenized with another tokenizer?"
            )
        return tokens

    def window(self, number: int) -> int:
        """Global window that sample `number` of this node is."""
        epoch, position = divmod(number, self.num_windows)
        if self._order[0] != epoch:
            # `own` data has the same order on every node, so that equal files mean equal training.
            self._order = (epoch, Permutation(self.num_windows, f"{self.seed}/{epoch}/{self.first}"))
        return self.first + self.stride * self._order[1][position]
