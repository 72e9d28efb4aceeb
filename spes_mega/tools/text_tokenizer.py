"""Tokenizers from disk: a sentencepiece model, or a Hugging Face tokenizer.json."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_mega.errors import DataError, system_errors
from spes_mega.text_files import read_json


@dataclass(frozen=True)
class TextTokenizer:
    """Text to token ids and back. `eod` is the id that ends a document, None where the tokenizer names none."""

    source: Path
    vocab_size: int
    eod: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


@system_errors(DataError)
def load_tokenizer(path: Path, eod_token: str | None = None) -> TextTokenizer:
    """Open a sentencepiece `.model`, a `tokenizer.json`, or a directory that holds one of them.

    Args:
        eod_token: the text of the token that ends a document; by default the tokenizer's own end of sequence.

    Raises:
        DataError: nothing usable is at `path`, or `eod_token` is not one of its tokens.
    """
    file = _tokenizer_file(Path(path))
    if file.suffix == ".json":
        return _load_tokenizers(file, eod_token)
    return _load_sentencepiece(file, eod_token)


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        candidates = [path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise DataError(f"{path}: neither tokenizer.json nor a sentencepiece .model in this directory")
        return found
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer; expected a .model, a tokenizer.json, or a directory with one")
    if path.suffix not in (".json", ".model"):
        raise DataError(f"{path}: expected a sentencepiece .model or a Hugging Face tokenizer.json")
    return path


def _load_sentencepiece(file: Path, eod_token: str | None) -> TextTokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.Load(str(file))
    except (OSError, RuntimeError) as e:
        raise DataError(f"{file}: not a sentencepiece model: {e}") from e
    eod = processor.eos_id() if processor.eos_id() >= 0 else None
    if eod_token is not None:
        eod = processor.piece_to_id(eod_token)
        if processor.id_to_piece(eod) != eod_token:
            raise DataError(f"{file}: {eod_token!r} is not one of its pieces")
    return TextTokenizer(
        source=file,
        vocab_size=processor.get_piece_size(),
        eod=eod,
        encode=processor.encode,
        decode=lambda ids: processor.decode(list(ids)),
    )


def _load_tokenizers(file: Path, eod_token: str | None) -> TextTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise DataError(f"{file}: not a tokenizer.json: {e}") from e
    # A tokenizer.json may carry truncation or padding from its last use; a corpus needs neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = eod_token if eod_token is not None else _declared_eos(file.parent)
    eod = None if text is None else tokenizer.token_to_id(text)
    if text is not None and eod is None:
        raise DataError(f"{file}: {text!r} is not one of its tokens")
    return TextTokenizer(
        source=file,
        # Ids may have holes, so the count of tokens would be too small a bound.
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eod=eod,
        encode=lambda document: tokenizer.encode(document, add_special_tokens=False).ids,
        decode=lambda ids: tokenizer.decode(list(ids)),
    )


def _declared_eos(folder: Path) -> str | None:
    """The end-of-sequence token that the files beside a tokenizer.json declare, if any."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder / name).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = read_json(file, DataError)
    return value if isinstance(value, dict) else {}
