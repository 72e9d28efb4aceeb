"""Tokenizing text into Megatron-Core indexed datasets, and the traps on the way."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spes_mega.data import tokenize as tokenize_module
from spes_mega.data.text_tokenizer import TextTokenizer, load_tokenizer
from spes_mega.data.tokenize import DatasetWriter, command, tokenize
from spes_mega.errors import DataError

TEXT = "the quick brown fox jumps over the lazy dog\nand the dog sleeps on while the fox runs\n" * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def spm(folder) -> Path:
    (folder / "text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "spm"), vocab_size=34, minloglevel=2
    )
    return folder / "spm.model"


@pytest.fixture(scope="module")
def hf(folder) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(max_length=4)
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf/tokenizer.json"))
    (folder / "hf/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder / "hf"


def read(prefix: Path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.index.dtype


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix not in (".txt", ".jsonl"))


def test_sentencepiece_documents_come_back_with_an_end_token_each(spm, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(str(spm))
    (tmp_path / "a.txt").write_text("the fox")
    (tmp_path / "b.jsonl").write_text('{"text": "the dog"}\n\n{"text": ""}\n{"text": "sleeps"}\n')
    result = tokenize((tmp_path / "a.txt", tmp_path / "b.jsonl"), spm, tmp_path / "data")
    documents, dtype = read(tmp_path / "data")
    expected = [[*processor.encode(text), processor.eos_id()] for text in ("the fox", "the dog", "sleeps")]
    assert documents == expected
    assert dtype == np.uint16
    assert (result.documents, result.tokens, result.skipped_empty) == (3, sum(map(len, expected)), 1)
    assert json.loads((tmp_path / "data.json").read_text())["vocab_size"] == processor.get_piece_size()
    assert leftovers(tmp_path) == ["data.bin", "data.idx", "data.json"]


def test_tokenizer_json_is_not_truncated_and_its_declared_eos_ends_documents(hf, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    tokenize((tmp_path / "a.txt",), hf, tmp_path / "data")
    documents, _ = read(tmp_path / "data")
    tokenizer = load_tokenizer(hf)
    assert documents[0][-1] == tokenizer.eod == 0
    assert tokenizer.decode(documents[0][:-1]).strip() == TEXT.strip()


def test_without_eod_the_tokens_are_the_text_alone(hf, tmp_path):
    (tmp_path / "a.txt").write_text("the fox")
    tokenize((tmp_path / "a.txt",), hf / "tokenizer.json", tmp_path / "data", append_eod=False)
    assert read(tmp_path / "data")[0] == [load_tokenizer(hf).encode("the fox")]


def test_a_tokenizer_without_eos_is_an_error_only_if_eod_is_asked_for(hf, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    alone = tmp_path / "tokenizer/tokenizer.json"
    alone.write_bytes((hf / "tokenizer.json").read_bytes())
    (tmp_path / "a.txt").write_text("the fox")
    with pytest.raises(DataError, match=r"names no end-of-document token.*--eod-token"):
        tokenize((tmp_path / "a.txt",), alone, tmp_path / "data")
    tokenize((tmp_path / "a.txt",), alone, tmp_path / "plain", append_eod=False)
    tokenize((tmp_path / "a.txt",), alone, tmp_path / "named", eod_token="<end>")
    assert read(tmp_path / "named")[0] == [read(tmp_path / "plain")[0][0] + [0]]
    with pytest.raises(DataError, match="'<fin>' is not one of its tokens"):
        tokenize((tmp_path / "a.txt",), alone, tmp_path / "data", eod_token="<fin>")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(spm, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(tokenize_module, "BATCH_CHARACTERS", 40)
    lines = [f"the dog number {i} runs" for i in range(25)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    tokenize((tmp_path / "a.jsonl",), spm, tmp_path / "data", text_key="body", workers=workers)
    processor = sentencepiece.SentencePieceProcessor(str(spm))
    assert read(tmp_path / "data")[0] == [[*processor.encode(line), processor.eos_id()] for line in lines]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_nothing_but_empty_documents_is_an_error_and_leaves_nothing(spm, tmp_path, name):
    (tmp_path / name).write_text("" if name == "a.txt" else '{"text": ""}\n{"text": ""}\n')
    with pytest.raises(DataError, match="no tokens"):
        tokenize((tmp_path / name,), spm, tmp_path / "data")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("texts", [["", "the fox"], ["the fox", ""], ["", "the fox", "", "dog", ""]])
def test_an_empty_document_anywhere_is_left_out(spm, tmp_path, texts):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    result = tokenize((tmp_path / "a.jsonl",), spm, tmp_path / "data")
    assert len(read(tmp_path / "data")[0]) == sum(map(bool, texts))
    assert result.skipped_empty == texts.count("")


BAD_LINES = {
    b'{"text": "the fox"': "malformed JSON",
    b'{"text": "\xff"}': "not valid UTF-8",
    b'{"body": "the fox"}': "no text under the key 'text'",
    b'{"text": 3}': "no text under the key 'text'",
    b'["the fox"]': "expected a JSON object",
    b'{"text": "\\ud800"}': "not valid Unicode",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_or_counted(spm, tmp_path, bad):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "the dog"}\n' + bad + b'\n{"text": "sleeps"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {BAD_LINES[bad]}"):
        tokenize((file,), spm, tmp_path / "data")
    assert leftovers(tmp_path) == []
    result = tokenize((file,), spm, tmp_path / "data", skip_bad=True)
    assert (result.documents, result.skipped_bad) == (2, 1)


def test_bad_utf8_in_a_text_file_is_named_by_line(spm, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(DataError, match=r"a\.txt:3: not valid UTF-8"):
        tokenize((tmp_path / "a.txt",), spm, tmp_path / "data")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32), (65_536, np.int32), (65_537, np.int32)]
)
def test_token_width_by_vocabulary_size(tmp_path, vocab_size, dtype):
    tokenizer = TextTokenizer(Path("words.model"), vocab_size, None, lambda text: [], lambda ids: "")
    with DatasetWriter(tmp_path / "data", tokenizer, eod=None) as writer:
        writer.add([0, vocab_size - 1])
        writer.commit(tokenize_module.Skipped())
    assert read(tmp_path / "data") == ([[0, vocab_size - 1]], dtype)


def _killed(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error_and_leaves_nothing(spm, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "_encode_batch", _killed)
    (tmp_path / "a.txt").write_text("the fox")
    with pytest.raises(DataError, match="worker was killed"):
        tokenize((tmp_path / "a.txt",), spm, tmp_path / "data", workers=2)
    assert leftovers(tmp_path) == []


def test_an_existing_dataset_is_not_overwritten(spm, tmp_path):
    (tmp_path / "a.txt").write_text("the fox")
    tokenize((tmp_path / "a.txt",), spm, tmp_path / "data")
    before = (tmp_path / "data.bin").read_bytes()
    with pytest.raises(DataError, match=r"data\.bin: exists already"):
        tokenize((tmp_path / "a.txt",), spm, tmp_path / "data")
    assert (tmp_path / "data.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "no such tokenizer"),
        ("a.model", "text", "not a sentencepiece model"),
        ("a.json", "text", "not a tokenizer.json"),
        ("a.bin", "text", "expected a sentencepiece"),
    ],
)
def test_tokenizers_that_are_none(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / name)


def test_the_command_reports_what_it_wrote_and_left_out(spm, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the dog"}\nnonsense\n')
    arguments = [str(tmp_path / "a.jsonl"), "--tokenizer", str(spm), "--out", str(tmp_path / "data"), "--skip-bad"]
    outcome = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "a.jsonl:2: malformed JSON" in outcome.output
    assert "in 1 documents, uint16, vocabulary 34; left out: 0 empty, 1 bad" in outcome.output
