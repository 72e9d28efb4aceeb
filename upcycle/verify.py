"""Compare the logits of source and result through Hugging Face transformers, which shares no code with `upcycle`."""

import contextlib
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spes_mega.errors import VerificationError
from spes_mega.layout.families import DERIVED
from spes_mega.layout.tensor_files import state_dict_in
from upcycle.methods import is_exact
from upcycle.plan import Plan

TOLERANCE = 1e-4
"""Largest difference of fp32 logits where mathematics says that there is none: rounding in sums of other order."""

_BATCH, _LENGTH = 2, 64


@dataclass(frozen=True)
class Verification:
    """`exact`: whether source and result should compute the same."""

    max_difference: float
    tokens: int
    exact: bool


def verify(src: Path, config: Path | None, out: Path, plan: Plan) -> Verification:
    """Run both models in fp32 on the same random tokens, one after the other.

    Raises:
        VerificationError: transformers is missing, or the logits differ by more than TOLERANCE although
            method and dtypes lose nothing.
    """
    length = min(_LENGTH, plan.model.max_seq_len)
    rng = torch.Generator().manual_seed(plan.settings.seed)
    tokens = torch.randint(plan.model.vocab_size, (_BATCH, length), generator=rng)
    # Libraries log to stdout while they load; ours is for results.
    with contextlib.redirect_stdout(sys.stderr):
        before, after = _logits(src, config, tokens), _logits(out, None, tokens)
    difference = float((before - after).abs().max())
    exact = is_exact(plan.settings) and plan.exact_dtypes
    if not difference <= (TOLERANCE if exact else float("inf")):
        raise VerificationError(
            f"{out}: its logits differ from those of {src} by up to {difference:.3g}, where at most {TOLERANCE:g} was "
            "expected; the result was kept for inspection, don't use it"
        )
    return Verification(difference, tokens.numel(), exact)


def check_available() -> None:
    """Raises VerificationError, saying what to install, where transformers is missing."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import transformers  # noqa: F401
    except ImportError as e:
        raise VerificationError(
            "--verify runs source and result in Hugging Face transformers, which is not installed: "
            "pip install 'spes-mega[hf]'"
        ) from e


@torch.inference_mode()
def _logits(path: Path, config: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    check_available()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = _open(path, config).eval()
    logits: torch.Tensor = model(tokens).logits.float()
    del model
    gc.collect()
    return logits


def _open(path: Path, config: Path | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if path.is_dir() and config is None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if path.is_dir():
        shape = AutoConfig.from_pretrained(config)
        return AutoModelForCausalLM.from_pretrained(path, config=shape, dtype=torch.float32)
    shape = AutoConfig.from_pretrained(config or path.parent / "config.json")
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    state = {name: tensor for name, tensor in _state_of(path).items() if not DERIVED.fullmatch(name)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if shape.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise VerificationError(f"{path}: transformers misses {missing} and does not know {unexpected}")
    model.tie_weights()
    return model


def _state_of(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    return state_dict_in(path, torch.load(path, map_location="cpu", weights_only=True, mmap=False))
