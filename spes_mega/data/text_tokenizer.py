"""Tokenizers from disk: a directory of Hugging Face's, a sentencepiece model, or a tokenizer.json."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_mega.errors import CheckpointError, DataError, system_errors
from spes_mega.files.git_lfs import refuse_pointer
from spes_mega.layout.tokenizer_files import SETTINGS, VOCABULARIES, files_of, panics_caught, read_tokenizer


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
    """Open a tokenizer: a directory as transformers' AutoTokenizer reads it, or one file alone.

    A file beside which others say more about its tokenizer (added_tokens.json and the like) stands for its directory.

    Args:
        path: a sentencepiece `.model`, a `tokenizer.json`, or a directory.
        eod_token: the text of the token that ends a document; by default the tokenizer's own end of sequence.

    Raises:
        DataError: nothing usable is at `path`, or `eod_token` is not one of its tokens.
    """
    path = Path(path)
    if path.is_dir():
        return _load_directory(path, eod_token)
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer; expected a .model, a tokenizer.json, or a directory with one")
    if path.suffix not in (".json", ".model"):
        raise DataError(f"{path}: expected a sentencepiece .model or a Hugging Face tokenizer.json")
    refuse_pointer(path, DataError)
    if files_of(path.parent, SETTINGS):
        return _load_directory(path.parent, eod_token)
    return _load_tokenizers(path, eod_token) if path.suffix == ".json" else _load_sentencepiece(path, eod_token)


def _load_directory(folder: Path, eod_token: str | None) -> TextTokenizer:
    if not files_of(folder, VOCABULARIES):
        raise DataError(f"{folder}: neither tokenizer.json nor a sentencepiece .model in this directory")
    try:
        tokenizer = read_tokenizer(folder)
    except ImportError as e:
        raise DataError(
            f"{folder}: a directory is read as transformers reads it, which is missing: pip install 'spes-mega[hf]', "
            "or give a tokenizer.json or .model that lies alone in a directory"
        ) from e
    except CheckpointError as e:
        raise DataError(str(e)) from e
    vocabulary = tokenizer.get_vocab()
    text = eod_token if eod_token is not None else tokenizer.eos_token
    if text is not None and text not in vocabulary:
        raise DataError(f"{folder}: {text!r} is not one of its tokens")
    return TextTokenizer(
        source=folder,
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        eod=None if text is None else vocabulary[text],
        encode=_named(folder, lambda document: tokenizer.encode(document, add_special_tokens=False, verbose=False)),
        decode=lambda ids: tokenizer.decode(list(ids)),
    )


def _named(source: Path, encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """What a library raises for a text that it cannot encode becomes a DataError."""

    def encoded(document: str) -> list[int]:
        try:
            with panics_caught():
                return encode(document)
        except Exception as e:  # the libraries raise bare Exception
            start = document[:40] + ("…" if len(document) > 40 else "")
            raise DataError(
                f"{source}: cannot encode the document that starts with {start!r}: {e} (a tokenizer without a token "
                "for unknown characters needs all of them in its vocabulary)"
            ) from e

    return encoded


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
        encode=_named(file, processor.encode),
        decode=lambda ids: processor.decode(list(ids)),
    )


def _load_tokenizers(file: Path, eod_token: str | None) -> TextTokenizer:
    from tokenizers import Tokenizer

    try:
        with panics_caught():
            tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise DataError(f"{file}: not a tokenizer.json: {e}") from e
    # A tokenizer.json may carry truncation or padding from its last use; a corpus needs neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eod = None if eod_token is None else tokenizer.token_to_id(eod_token)
    if eod_token is not None and eod is None:
        raise DataError(f"{file}: {eod_token!r} is not one of its tokens")
    return TextTokenizer(
        source=file,
        # Ids may have holes, so the count of tokens would be too small a bound.
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eod=eod,
        encode=_named(file, lambda document: tokenizer.encode(document, add_special_tokens=False).ids),
        decode=lambda ids: tokenizer.decode(list(ids)),
    )
