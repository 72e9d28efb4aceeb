"""`spes-mega tokenize`: text files to a Megatron-Core indexed dataset (`PREFIX.bin`, `PREFIX.idx`)."""

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console

from spes_mega.data.dataset_record import fingerprint
from spes_mega.data.documents import DocumentReader, Skipped, check_files
from spes_mega.data.text_tokenizer import TextTokenizer, load_tokenizer
from spes_mega.errors import DataError, system_errors
from spes_mega.files.durable import sync_path
from spes_mega.signals import handling

BATCH_CHARACTERS = 1 << 20  # text handed to a worker at a time
MAX_VOCABULARY = 1 << 31  # ids are int32
SUFFIXES = (".bin", ".json", ".idx")  # renamed in this order: a dataset exists once its index does


@dataclass(frozen=True)
class TokenizedDataset:
    """What was written; also the content of `PREFIX.json`."""

    tokenizer: str
    vocab_size: int
    eod: int | None
    dtype: str
    documents: int
    tokens: int
    skipped_empty: int
    skipped_bad: int
    smallest_token: int
    largest_token: int
    fingerprint: str
    """Of the .bin file: see `layout/dataset_record.py`, which reads these three."""


@system_errors(DataError)
def tokenize(
    files: tuple[Path, ...],
    tokenizer: Path,
    out: Path,
    *,
    text_key: str = "text",
    append_eod: bool = True,
    eod_token: str | None = None,
    workers: int = 1,
    skip_bad: bool = False,
    skipped: Skipped | None = None,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> TokenizedDataset:
    """Tokenize `files` into `out`.bin, `out`.idx and `out`.json; on an error nothing is left of them.

    `progress` is called with the documents and tokens written so far, after each document.

    Tokens are uint16 below a vocabulary of 65 500, else int32, as Megatron-Core chooses.

    Raises:
        DataError: a file, a document or the tokenizer cannot be used, no token came out, or `out` exists.
    """
    check_files(files)
    for suffix in SUFFIXES:
        if Path(f"{out}{suffix}").exists():
            raise DataError(f"{out}{suffix}: exists already; remove it or choose another --out")
    loaded = load_tokenizer(tokenizer, eod_token)
    if loaded.vocab_size > MAX_VOCABULARY:
        raise DataError(
            f"{loaded.source}: has token ids up to {loaded.vocab_size - 1}; an indexed dataset holds ids below "
            f"{MAX_VOCABULARY}"
        )
    if append_eod and loaded.eod is None:
        raise DataError(
            f"{loaded.source}: the tokenizer names no end-of-document token; "
            "name one with --eod-token, or give --no-append-eod"
        )
    skipped = skipped if skipped is not None else Skipped()
    reader = DocumentReader(text_key, skip_bad, skipped)
    documents = (document for file in files for document in reader.read(file))
    with (
        system_errors(DataError, out, "cannot be written"),
        DatasetWriter(out, loaded, eod=loaded.eod if append_eod else None) as writer,
    ):
        for ids in _encode_all(documents, loaded, eod_token, workers):
            if ids:
                writer.add(ids)
                progress(writer.documents, writer.tokens)
            else:
                skipped.empty += 1
        return writer.commit(skipped)


def _encode_all(
    documents: Iterable[str], tokenizer: TextTokenizer, eod_token: str | None, workers: int
) -> Iterator[list[int]]:
    if workers <= 1:
        yield from map(tokenizer.encode, documents)
        return
    # spawn: workers start clean, without threads and locks of this process
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.source, eod_token))
    pending: deque[Future[list[list[int]]]] = deque()
    try:
        for batch in _batches(documents):
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as e:
        raise DataError("a tokenizer worker was killed (out of memory?); try fewer --workers") from e
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker_tokenizer: TextTokenizer | None = None


def _start_worker(source: Path, eod_token: str | None) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(source, eod_token)


def _encode_batch(batch: list[str]) -> list[list[int]]:
    assert _worker_tokenizer is not None
    return [_worker_tokenizer.encode(document) for document in batch]


class DatasetWriter:
    """Writes into a temporary folder beside `out`; `commit` moves the files into place, all else removes them."""

    def __init__(self, out: Path, tokenizer: TextTokenizer, eod: int | None) -> None:
        import spes_mega.model  # noqa: F401 - imports Megatron-Core without its warnings
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # isort: skip

        self.out, self.tokenizer, self.eod = out, tokenizer, eod
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)
        out.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            self.builder = IndexedDatasetBuilder(str(self.folder / "data.bin"), dtype=self.dtype)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.documents = self.tokens = 0
        self.smallest, self.largest = tokenizer.vocab_size, 0

    def __enter__(self) -> Self:
        return self

    def add(self, ids: list[int]) -> None:
        """Append one document, and the end-of-document token if one is asked for."""
        ids = ids if self.eod is None else [*ids, self.eod]
        self.builder.add_document(ids, [len(ids)])
        self.smallest, self.largest = min(self.smallest, *ids), max(self.largest, *ids)
        self.documents += 1
        self.tokens += len(ids)

    def commit(self, skipped: Skipped) -> TokenizedDataset:
        """Finish the files and give them their names. Raises DataError where there is no token."""
        if not self.tokens:
            raise DataError(f"no tokens: every document was empty or left out, so {self.out} was not written")
        self.builder.finalize(str(self.folder / "data.idx"))
        result = TokenizedDataset(
            tokenizer=str(self.tokenizer.source),
            vocab_size=self.tokenizer.vocab_size,
            eod=self.eod,
            dtype=self.dtype.__name__,
            documents=self.documents,
            tokens=self.tokens,
            skipped_empty=skipped.empty,
            skipped_bad=skipped.bad,
            smallest_token=self.smallest,
            largest_token=self.largest,
            fingerprint=fingerprint(self.folder / "data.bin"),
        )
        (self.folder / "data.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        for suffix in SUFFIXES:
            sync_path(self.folder / f"data{suffix}")
        for suffix in SUFFIXES:
            (self.folder / f"data{suffix}").rename(f"{self.out}{suffix}")
        return result

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.builder.data_file.close()  # may find that what is still held back has no room
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends the process by an exception, so that temporary files are removed."""

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    with handling(signal.SIGTERM, stop):
        yield


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", required=True, type=click.Path(path_type=Path), help="a .model, a tokenizer.json, or its directory"
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="prefix of the .bin and .idx files")
@click.option("--text-key", default="text", show_default=True, help="key of the text in a JSON line")
@click.option("--append-eod/--no-append-eod", default=True, show_default=True, help="end each document with a token")
@click.option("--eod-token", help="text of that token  [default: the tokenizer's end of sequence]")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="processes that tokenize")
@click.option("--skip-bad", is_flag=True, help="count malformed documents and go on, instead of stopping")
def command(out: Path, **options: Any) -> None:
    """Turn text FILES into an indexed dataset: .txt is one document, .jsonl one a line."""
    skipped = Skipped()
    with _ended_by_sigterm(), Console(stderr=True).status("reading") as status:

        def show(documents: int, tokens: int) -> None:
            if documents % 100 == 0:
                status.update(f"{documents} documents, {tokens} tokens")

        result = tokenize(out=out, skipped=skipped, progress=show, **options)
    for reason in skipped.reasons:
        click.echo(f"left out: {reason}", err=True)
    click.echo(
        f"{out}: {result.tokens} tokens in {result.documents} documents, {result.dtype}, vocabulary "
        f"{result.vocab_size}; left out: {skipped.empty} empty, {skipped.bad} bad"
    )
