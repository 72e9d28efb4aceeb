"""Tokens at rest: a Megatron-Core indexed dataset (`PREFIX.bin`, `PREFIX.idx`), read as one stream."""

import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spes_mega.data.dataset_record import read_record
from spes_mega.errors import DataError, system_errors
from spes_mega.files.git_lfs import refuse_pointer

Tokens = npt.NDArray[np.int64]
_AT_ONCE = 16 << 20
"""Tokens that a pass over a whole dataset reads at a time."""

_INDEX = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, documents
_MAGIC, _VERSION, _CODES, _FLOAT_CODES = b"MMIDIDX\x00\x00", 1, range(1, 9), (6, 7)
_SEQUENCES_AT_ONCE = 1 << 20


class TokenStream:
    """All documents of an indexed dataset, one after the other."""

    @system_errors(DataError)
    def __init__(self, prefix: Path) -> None:
        """Raises DataError: there is no dataset at `prefix`, or its two files do not belong together."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Megatron says of packages that reading tokens does not need
            from megatron.core.datasets.indexed_dataset import IndexedDataset  # slow to import: on use alone

        self.prefix = prefix
        for suffix in (".idx", ".bin"):
            if not Path(f"{prefix}{suffix}").is_file():
                raise DataError(f"{prefix}{suffix}: no such file; `spes-mega tokenize` writes indexed datasets")
            refuse_pointer(Path(f"{prefix}{suffix}"), DataError)
        _check_index(Path(f"{prefix}.idx"))
        try:
            self._dataset = IndexedDataset(str(prefix), mmap=False)  # a file that shrinks under a map is a SIGBUS
        except (AssertionError, ValueError, KeyError, struct.error) as e:
            raise DataError(f"{prefix}.idx: not the index of a Megatron-Core dataset: {e}") from e
        index = self._index = self._dataset.index
        self._dtype = np.dtype(index.dtype)
        _check_order(Path(f"{prefix}.idx"), index, self._dtype.itemsize)
        self.num_tokens = int(np.sum(index.sequence_lengths, dtype=np.int64))
        try:
            self._file = Path(f"{prefix}.bin").open("rb", buffering=0)  # noqa: SIM115 - closed with this object
        except OSError as e:
            raise DataError(f"{prefix}.bin: cannot read: {e.strerror}") from e
        size = os.fstat(self._file.fileno()).st_size
        if size != self.num_tokens * self._dtype.itemsize:
            raise DataError(
                f"{prefix}.bin: {size} bytes, but its index speaks of {self.num_tokens} tokens of "
                f"{self._dtype.itemsize} bytes: copied incompletely?"
            )

    def read(self, start: int, count: int) -> Tokens:
        """Tokens start..start+count-1, int64 [count]. Raises DataError: they cannot be read, or are not there."""
        offset, size = start * self._dtype.itemsize, count * self._dtype.itemsize
        parts: list[bytes] = []
        while size:
            try:
                part = os.pread(self._file.fileno(), size, offset)
            except OSError as e:
                raise DataError(f"{self.prefix}.bin: cannot read at byte {offset}: {e.strerror}") from e
            if not part:
                raise DataError(f"{self.prefix}.bin: ends at byte {offset}: was it changed while it was in use?")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return np.frombuffer(b"".join(parts), self._dtype).astype(np.int64)

    def read_below(self, start: int, count: int, vocab_size: int) -> Tokens:
        """As `read`. Raises DataError, naming document and position: a token id is not in 0..`vocab_size` - 1."""
        tokens = self.read(start, count)
        if count and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            first = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
            raise self._outside(start + first, int(tokens[first]), vocab_size)
        return tokens

    def check_all_below(self, vocab_size: int, advance: Callable[[int], None] = lambda count: None) -> None:
        """Raise DataError unless all token ids are in 0..`vocab_size` - 1.

        What `tokenize` recorded is believed; without it every token is read. `advance` is told how many were read.
        """
        record = read_record(self.prefix)
        if record is not None and record.smallest_token >= 0 and record.largest_token < vocab_size:
            return
        for start in range(0, self.num_tokens, _AT_ONCE):
            count = min(_AT_ONCE, self.num_tokens - start)
            self.read_below(start, count, vocab_size)
            advance(count)

    def _outside(self, position: int, token: int, vocab_size: int) -> DataError:
        ends = np.cumsum(self._index.sequence_lengths, dtype=np.int64)
        sequence = int(np.searchsorted(ends, position, side="right"))
        document = int(np.searchsorted(self._index.document_indices, sequence, side="right")) - 1
        begin = int(ends[first - 1]) if (first := int(self._index.document_indices[document])) else 0
        return DataError(
            f"{self.prefix}.bin: token {position - begin} of document {document} (both counted from 0; token "
            f"{position} of the file) is {token}, but model.vocab_size {vocab_size} allows 0 to {vocab_size - 1}: was "
            "it tokenized with another tokenizer, or written with a smaller integer type than its ids need?"
        )


def _check_index(path: Path) -> None:
    """Raise DataError if Megatron-Core could not read this index: where it fails, its reader leaves noise on stderr."""
    with path.open("rb") as file:
        header, size = file.read(_INDEX.size), path.stat().st_size
    if len(header) == _INDEX.size:
        magic, version, code, sequences, documents = _INDEX.unpack(header)
        if magic == _MAGIC and version == _VERSION and code in _CODES:
            if code in _FLOAT_CODES:
                raise DataError(f"{path}: says that the tokens are floating-point numbers; token ids are integers")
            if size < _INDEX.size + sequences * (4 + 8) + documents * 8:
                raise DataError(f"{path}: truncated: {size} bytes, for {sequences} sequences and {documents} documents")
            if documents:
                return
    raise DataError(f"{path}: not the index of a Megatron-Core dataset; `spes-mega tokenize` writes one")


def _check_order(path: Path, index: Any, token_bytes: int) -> None:
    """Raise DataError unless the sequences follow one another in the .bin file, as every writer of the format has them.

    They are read as one stream, so in another order the tokens would not be those that the index means.
    """
    expected = 0
    for start in range(0, len(index.sequence_lengths), _SEQUENCES_AT_ONCE):
        lengths = index.sequence_lengths[start : start + _SEQUENCES_AT_ONCE].astype(np.int64)
        ends = expected + np.cumsum(lengths) * token_bytes
        pointers = index.sequence_pointers[start : start + _SEQUENCES_AT_ONCE]
        wrong = np.flatnonzero((lengths < 0) | (pointers != ends - lengths * token_bytes))
        if wrong.size:
            raise DataError(
                f"{path}: damaged: sequence {start + wrong[0]} has {lengths[wrong[0]]} tokens from byte "
                f"{pointers[wrong[0]]} on, where the one before ends at another byte"
            )
        expected = int(ends[-1])
    documents = index.document_indices
    if documents[0] != 0 or (documents[1:] < documents[:-1]).any():
        raise DataError(f"{path}: damaged: its documents do not follow one another")
