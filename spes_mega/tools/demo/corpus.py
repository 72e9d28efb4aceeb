"""Real text that every CPython carries: its own language reference, split into training and held-out parts."""

import json
import pydoc_data.topics
from pathlib import Path

BLOCK_CHARS = 2000
HELD_OUT_EVERY = 10


def blocks() -> list[str]:
    """The reference in blocks of whole paragraphs, each about `BLOCK_CHARS` characters long."""
    out: list[str] = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        block = ""
        for paragraph in text.split("\n\n"):
            block += paragraph + "\n\n"
            if len(block) >= BLOCK_CHARS:
                out.append(block)
                block = ""
        if block.strip():
            out.append(block)
    return out


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `valid.jsonl` (every tenth block) into `folder`; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    train, valid = folder / "train.jsonl", folder / "valid.jsonl"
    with train.open("w", encoding="utf-8") as t, valid.open("w", encoding="utf-8") as v:
        for i, block in enumerate(blocks()):
            (v if i % HELD_OUT_EVERY == 0 else t).write(json.dumps({"text": block}) + "\n")
    return train, valid


def train_tokenizer(jsonl: Path, folder: Path, vocab_size: int) -> Path:
    """Train a byte-pair tokenizer on the texts of `jsonl`; returns `folder`, which AutoTokenizer opens.

    Line breaks and runs of spaces are kept: in the reference they are grammar. Of the sentencepiece model nothing is
    left but a tokenizer.json and a tokenizer_config.json: beside a config.json, transformers would guess.
    """
    import sentencepiece
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    with jsonl.open(encoding="utf-8") as f:
        texts = [json.loads(line)["text"] for line in f]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["\n"],
        max_sentence_length=1_000_000,
        minloglevel=2,
    )
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    for suffix in (".model", ".vocab"):
        (folder / "tokenizer").with_suffix(suffix).unlink()
    return folder
