"""What the finished snapshot is worth to a user of Hugging Face transformers: its loss, and a sample of its text."""

from pathlib import Path
from typing import Any

from spes_mega.data.token_stream import TokenStream

PROMPT = "The assert statement"


def open_snapshot(snapshot: Path) -> Any:
    """The snapshot through stock `AutoModelForCausalLM`, in fp32, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).eval()


def transformers_loss(model: Any, prefix: Path, seq_len: int, windows_at_once: int = 16) -> float:
    """Mean loss (nats per token) of a transformers model on an indexed dataset.

    Windows of `seq_len` predictions follow one another over the token stream, as in `spes-mega evaluate`;
    the last may be shorter.
    """
    import torch

    source = TokenStream(prefix)
    stream = torch.from_numpy(source.read(0, source.num_tokens))
    whole = (len(stream) - 1) // seq_len
    batches = [
        torch.stack([stream[w * seq_len : (w + 1) * seq_len + 1] for w in range(start, stop)])
        for start in range(0, whole, windows_at_once)
        for stop in [min(start + windows_at_once, whole)]
    ]
    if len(stream) - 1 > whole * seq_len:
        batches.append(stream[None, whole * seq_len :])
    total = 0.0
    with torch.inference_mode():
        for batch in batches:
            logits = model(batch[:, :-1]).logits.float()
            labels = batch[:, 1:].reshape(-1)
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
    return total / (len(stream) - 1)


def sample(model: Any, snapshot: Path, seed: int = 0, new_tokens: int = 80) -> str:
    """Text that the model writes after a short prompt, through the snapshot's own tokenizer."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    torch.manual_seed(seed)
    prompt = torch.tensor([tokenizer.encode(PROMPT, add_special_tokens=False)])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=True, top_k=20
    )
    return str(tokenizer.decode(tokens[0].tolist()))
