"""`spes-mega evaluate`: loss and perplexity of a checkpoint on an indexed dataset, through the training model."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from spes_mega.data.token_stream import TokenStream
from spes_mega.errors import CheckpointError, DataError, RecipeError, system_errors
from spes_mega.layout import Checkpoint, open_checkpoint
from spes_mega.model import build, forward_logits, language_model_loss, load_weights
from spes_mega.recipe import ModelSection, Recipe, TrainSection

DEFAULT_SEQ_LEN = 2048
LARGEST_EXPONENT = 700.0  # math.exp overflows above


@dataclass(frozen=True)
class Evaluation:
    """Mean cross entropy in nats over `tokens` predicted tokens, and its exponential."""

    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Windows:
    """The stream cut into windows of `seq_len` inputs; each predicts the token after each of its inputs.

    Every token but the first is predicted exactly once; the last window is as short as the stream leaves it.
    """

    stream: TokenStream
    vocab_size: int
    seq_len: int
    batch_size: int
    tokens: int

    def __len__(self) -> int:
        """Number of batches."""
        return -(-(self.tokens // self.seq_len) // self.batch_size) + bool(self.tokens % self.seq_len)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Batches int64 [B, S + 1], where a window's last token is the next one's first."""
        whole = self.tokens // self.seq_len
        for first in range(0, whole, self.batch_size):
            numbers = range(first, min(first + self.batch_size, whole))
            yield torch.stack([self._window(number, self.seq_len) for number in numbers])
        if rest := self.tokens % self.seq_len:
            yield self._window(whole, rest)[None]

    def _window(self, number: int, length: int) -> torch.Tensor:
        tokens = self.stream.read_below(number * self.seq_len, length + 1, self.vocab_size)
        return torch.from_numpy(tokens)


def evaluate(
    checkpoint: Path,
    data: Path,
    *,
    seq_len: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    dtype: str = "fp32",
) -> Evaluation:
    """Evaluate a Hugging Face-layout checkpoint on the indexed dataset with prefix `data`.

    Args:
        seq_len: inputs of one window; default: the model's longest sequence, at most 2048.
        max_tokens: stop after predicting so many tokens.

    Raises:
        CheckpointError, DataError: either cannot be read, or the loss is not finite.
        RecipeError: `seq_len` is longer than the model allows.
    """
    with open_checkpoint(checkpoint) as source:
        seq_len = _seq_len(source.model, seq_len)
        windows = _windows(TokenStream(data), source.model, seq_len, batch_size, max_tokens)
        gpt = _load(source, seq_len, dtype)
    total = _total_loss(gpt, windows)
    if not math.isfinite(total):
        raise CheckpointError(f"{checkpoint}: the loss on {data} is {total}: are there NaN or infinite weights?")
    loss = total / windows.tokens
    return Evaluation(loss, math.exp(min(loss, LARGEST_EXPONENT)), windows.tokens)


def _seq_len(model: ModelSection, seq_len: int | None) -> int:
    if seq_len is None:
        return min(model.max_seq_len, DEFAULT_SEQ_LEN)
    if seq_len > model.max_seq_len:
        raise RecipeError(f"--seq-len {seq_len}: the model is made for at most {model.max_seq_len} positions")
    return seq_len


def _windows(
    stream: TokenStream, model: ModelSection, seq_len: int, batch_size: int, max_tokens: int | None
) -> Windows:
    tokens = stream.num_tokens - 1 if max_tokens is None else min(stream.num_tokens - 1, max_tokens)
    if tokens < 1:
        raise DataError(f"{stream.prefix}: {stream.num_tokens} tokens are too few, at least 2 are needed")
    return Windows(stream, model.vocab_size, seq_len, batch_size, tokens)


def _load(source: Checkpoint, seq_len: int, dtype: str) -> Any:
    model = source.model.model_copy(update={"frozen_dtype": "train"})  # nothing is rounded more than was asked for
    recipe = Recipe(model=model, train=TrainSection.model_validate({"seq_len": seq_len, "dtype": dtype}))
    gpt = build(recipe, owned=())
    load_weights(gpt, source.model, source.read)
    return gpt.eval().requires_grad_(False)


@torch.no_grad()
def _total_loss(gpt: Any, windows: Windows) -> float:
    device = next(gpt.parameters()).device
    console = Console(stderr=True)
    total = 0.0
    for batch in track(windows, "evaluate", console=console, disable=not console.is_terminal):
        inputs, labels = batch[:, :-1].to(device), batch[:, 1:].to(device)
        loss, _ = language_model_loss(forward_logits(gpt, inputs), labels, 0.0)
        total += loss.item() * labels.numel()
    return total


@click.command("evaluate")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="prefix of an indexed dataset")
@click.option("--seq-len", type=click.IntRange(1), help="tokens of a window  [default: the model's, at most 2048]")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="windows at a time")
@click.option("--max-tokens", type=click.IntRange(1), help="predict only so many tokens  [default: all]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="to compute in")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@system_errors(DataError)
def command(
    checkpoint: Path,
    data: Path,
    seq_len: int | None,
    batch_size: int,
    max_tokens: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Loss, perplexity and tokens of CHECKPOINT, a Hugging Face-layout directory, on an indexed dataset.

    The token stream is cut into windows that follow one another; each token but the very first is predicted once,
    from those before it in its window.
    """
    result = evaluate(checkpoint, data, seq_len=seq_len, batch_size=batch_size, max_tokens=max_tokens, dtype=dtype)
    if as_json:
        click.echo(json.dumps(asdict(result)))
    else:
        click.echo(f"loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  tokens {result.tokens}")
