"""Documents out of text files: a `.txt` is one document, a `.jsonl` holds one in each line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spes_mega.errors import DataError, system_errors
from spes_mega.files.git_lfs import refuse_pointer


@dataclass
class Skipped:
    """What was left out so far: bad documents (`--skip-bad`) and empty ones, and the first few reasons."""

    bad: int = 0
    empty: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_bad(self, reason: str) -> None:
        self.bad += 1
        if len(self.reasons) < 5:
            self.reasons.append(reason)


@dataclass(frozen=True)
class DocumentReader:
    """Reads documents in order; a bad one is an error that names file and line, or counted with `skip_bad`."""

    text_key: str
    skip_bad: bool
    skipped: Skipped

    def read(self, file: Path) -> Iterator[str]:
        """Non-empty documents of one file. Raises DataError."""
        documents = self._read_jsonl(file) if file.suffix == ".jsonl" else self._read_txt(file)
        try:
            for document in documents:
                if document:
                    yield document
                else:
                    self.skipped.empty += 1
        except OSError as e:
            raise DataError(f"{file}: cannot be read: {e.strerror}") from e

    def _read_txt(self, file: Path) -> Iterator[str]:
        raw = file.read_bytes()
        try:
            yield raw.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            line = raw.count(b"\n", 0, e.start) + 1
            self._bad(f"{file}:{line}: not valid UTF-8 ({e.reason})")

    def _read_jsonl(self, file: Path) -> Iterator[str]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield self._text_of(line)
                except ValueError as e:
                    self._bad(f"{file}:{number}: {e}")

    def _text_of(self, line: bytes) -> str:
        """The text of one JSON line. Raises ValueError, without file and line."""
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as e:
            raise ValueError(f"not valid UTF-8 ({e.reason})") from e
        except json.JSONDecodeError as e:
            raise ValueError(f"malformed JSON: {e.msg} at column {e.colno}") from e
        except RecursionError as e:
            raise ValueError("malformed JSON: nested too deeply") from e
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        text = value.get(self.text_key)
        if not isinstance(text, str):
            raise ValueError(f"no text under the key {self.text_key!r} (choose another with --text-key)")
        try:
            text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no tokenizer takes
        except UnicodeEncodeError as e:
            raise ValueError(f"not valid Unicode ({e.reason})") from e
        return text

    def _bad(self, reason: str) -> None:
        if not self.skip_bad:
            raise DataError(f"{reason}; --skip-bad leaves such documents out")
        self.skipped.add_bad(reason)


@system_errors(DataError)
def check_files(files: tuple[Path, ...]) -> None:
    """Raise DataError unless every file exists and is a .txt or a .jsonl."""
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: no such file")
        if file.suffix not in (".txt", ".jsonl"):
            raise DataError(f"{file}: expected .txt (one document) or .jsonl (one JSON object a line)")
        refuse_pointer(file, DataError)
