"""The files beside the weights: a model's tokenizer, its chat templates, and how to generate with it.

What transformers' AutoTokenizer reads from a directory depends on config.json too: a class of tokenizer goes with a
model type, and some classes build their own rules around the vocabulary that they find. So a tokenizer that is carried
from one family to another is compared as AutoTokenizer reads it.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spes_mega.errors import CheckpointError
from spes_mega.files.git_lfs import refuse_pointer

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.*.json",
    "*.model",
    "tokenizer.model.*",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
SETTINGS = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
TOKENIZER = (*VOCABULARIES, *SETTINGS)
OTHERS = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)
_SAMPLE_PIECES = 500


def files_of(folder: Path, patterns: tuple[str, ...] = (*TOKENIZER, *OTHERS)) -> list[str]:
    """Names of the files in `folder` that belong to its model beside the weights, sorted."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in found)


def copy_files(source: Path, target: Path) -> None:
    """Copy them. Raises CheckpointError: one is a Git LFS pointer."""
    for name in files_of(source):
        refuse_pointer(source / name, CheckpointError)
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a directory, as AutoTokenizer reads it, without network and without code from the directory.

    Raises:
        ImportError: transformers is not installed.
        CheckpointError: there is none that can be read, or transformers has to guess how, and guesses wrong.
    """
    for name in files_of(folder):
        refuse_pointer(folder / name, CheckpointError)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        with panics_caught():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # the library raises whatever the files lead to
        reason = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise CheckpointError(f"{folder}: transformers cannot read its tokenizer: {reason}") from e
    _check_guess(folder, tokenizer)
    return tokenizer


@contextmanager
def panics_caught() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no Exception to Python, into a RuntimeError."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise RuntimeError(str(e)) from e


def settle_tokenizer(source: Path, result: Path) -> str | None:
    """Make AutoTokenizer read `result`, to which the files of `source` were copied, as it reads `source`.

    Where the other config.json of `result` leads to another tokenizer, it is saved anew as the one of `source`. Where
    that cannot be had, `result` is left without a tokenizer.

    Returns:
        What a user should know about it: why there is no tokenizer, or that nothing was compared. Else None.
    """
    if not files_of(result, TOKENIZER):
        return None
    try:
        wanted = read_tokenizer(source)
        if _read_alike(wanted, result):
            return None
        _remove(result)
        wanted.save_pretrained(result)
        if _read_alike(wanted, result):
            return None
        reason = f"transformers would not read it as it reads that of {source}"
    except ImportError:
        return (
            "the tokenizer was copied; whether transformers reads it alike in both families was not compared "
            "(pip install 'spes-mega[hf]')"
        )
    except CheckpointError as e:
        reason = str(e)
    _remove(result)
    return f"the tokenizer was left out: {reason}"


def _read_alike(wanted: Any, result: Path) -> bool:
    try:
        found = read_tokenizer(result)
    except CheckpointError:
        return False
    return _rules(wanted) == _rules(found)


def _rules(tokenizer: Any) -> list[Any]:
    """All that turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else type(tokenizer).__name__
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk", "pad")]
    return [rules, special, tokenizer.get_vocab(), getattr(tokenizer, "split_special_tokens", False)]


def _remove(folder: Path) -> None:
    for name in files_of(folder, TOKENIZER):
        (folder / name).unlink()


def _check_guess(folder: Path, tokenizer: Any) -> None:
    """A lone sentencepiece model is read by the class that goes with the model type, which may know nothing of it."""
    models = [folder / name for name in files_of(folder, ("*.model",))]
    if len(models) != 1 or files_of(folder, ("tokenizer.json", "vocab.json")) or _declares_class(folder):
        return
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor()
    try:
        pieces.Load(str(models[0]))
    except (OSError, RuntimeError):
        return  # not a sentencepiece model
    normal = [i for i in range(pieces.get_piece_size()) if not (pieces.is_control(i) or pieces.is_unknown(i))]
    text = pieces.decode([i for i in normal if not pieces.is_byte(i)][:_SAMPLE_PIECES])
    if tokenizer.encode(text, add_special_tokens=False) != pieces.encode(text):
        raise CheckpointError(
            f"{models[0]}: transformers reads it as a {type(tokenizer).__name__}, with other ids than sentencepiece "
            "gives: add the tokenizer_config.json that belongs to it, with its tokenizer_class"
        )


def _declares_class(folder: Path) -> bool:
    for name in ("tokenizer_config.json", "config.json"):
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and raw.get("tokenizer_class"):
            return True
    return False
