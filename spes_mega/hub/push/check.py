"""Checks of a push that has arrived: names, shapes, dtypes, token count, and how far it leads away."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spes_mega.quoting import quoted
from spes_mega.recipe import Recipe
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.protocol import TOKENS_KEY
from spes_mega.wire.tensor_specs import Forms, data_bytes, header_limit

MAX_TOKENS = 10**15
MAX_SAMPLES_PER_STEP = 1 << 16
"""Of one node. What a node really takes is its own matter (train.batch_size, or train.micro_batch_size,
train.grad_accumulation and its ranks), so this is only far above what anybody trains with."""


@dataclass(frozen=True)
class Expected:
    """The push that is due from a node."""

    node: int
    forms: Forms
    """Names, shapes and codecs of the tensors that it has to push."""
    max_tokens: int
    """Tokens that it can have trained on in a round, generously."""

    @property
    def source(self) -> str:
        """The name of the push in messages."""
        return f"push of node {self.node}"

    @property
    def max_header(self) -> int:
        """The largest header that is accepted, in bytes."""
        return header_limit(self.forms)


def check_size(total_bytes: int, expected: Expected) -> None:
    """Raise PayloadError if a push of so many bytes cannot hold the tensors that are due, and no more."""
    least = data_bytes(expected.forms)
    most = least + expected.max_header
    if not least < total_bytes <= most:
        raise PayloadError(
            f"a push of {total_bytes} bytes: the tensors of this node take {least}, with their header at most {most}"
        )


@contextmanager
def well_formed(path: Path, expected: Expected) -> Iterator[StoredPayload]:
    """Open a push whose names, shapes, dtypes and metadata are those that are due. Raise PayloadError."""
    payload = StoredPayload.open(path, expected.source, expected.max_header)
    try:
        payload.check(expected.forms)
        check_tokens(payload, expected.max_tokens)
        yield payload
    finally:
        payload.close()


def tokens_of(payload: StoredPayload) -> int:
    """Return how many tokens the node says it trained on. Raise PayloadError unless it is a number."""
    text = payload.header.metadata.get(TOKENS_KEY, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= MAX_TOKENS):
        raise PayloadError(f"metadata {TOKENS_KEY!r} is not a number of tokens: {quoted(text, 40)}")
    return int(text)


def check_tokens(payload: StoredPayload, most: int) -> None:
    """Raise PayloadError if a node says that it trained on more than `most` tokens."""
    if (tokens := tokens_of(payload)) > most:
        raise PayloadError(
            f"metadata {TOKENS_KEY!r}: {tokens} tokens are more than a node trains on in a round ({most} at most: "
            f"spes.sync_every steps of {MAX_SAMPLES_PER_STEP} samples of train.seq_len)"
        )


def most_tokens(recipe: Recipe) -> int:
    """Return how many tokens a node can have trained on in a round, generously."""
    return min(MAX_TOKENS, recipe.spes.sync_every * MAX_SAMPLES_PER_STEP * recipe.train.seq_len)
