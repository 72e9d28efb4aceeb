"""The ids that AutoTokenizer gives are those that `tokenize` gives, and that results keep; or it is refused."""

import json
import shutil

import pytest
import sentencepiece
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spes_mega.data.text_tokenizer import load_tokenizer
from spes_mega.data.tokenize import tokenize
from spes_mega.errors import DataError
from spes_mega.layout import CheckpointWriter, expected_tensors, open_checkpoint
from spes_mega.recipe import ModelSection, UpcycleSection
from spes_mega.tools.convert import convert, plan_conversion
from upcycle.pipeline import upcycle
from upcycle.plan import make_plan
from upcycle.sources import open_sources

transformers = pytest.importorskip("transformers")

TEXT = "the quick brown fox jumps over the lazy dog\nand the dog sleeps on while the fox runs\n" * 8
SAMPLES = ("the fox sleeps", "  over <extra> the\n\ndogs<extra>", "Zebra, ünknown", "<|im_start|>fox</s>")
SHAPE = {
    "num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4, "ffn_hidden_size": 8,
    "vocab_size": 400,
}  # fmt: skip
LLAMA, LEGACY = {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "LlamaTokenizer", "legacy": False}
ADDED = {
    "added_tokens.json": {"<extra>": 60, "<|im_start|>": 61},
    "special_tokens_map.json": {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]},
}
EXTRA = {"content": "<extra>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
DECODER = {"tokenizer_config.json": LLAMA | {"added_tokens_decoder": {"60": EXTRA | {"special": False}}}}
# name: model type, vocabulary, files beside it
DIRECTORIES = {
    "bare sentencepiece": ("llama", "bpe", {}),
    "bare unigram": ("llama", "unigram", {}),
    "sentencepiece and added tokens": ("llama", "bpe", ADDED),
    "sentencepiece, added tokens and a class": ("llama", "bpe", ADDED | {"tokenizer_config.json": LLAMA}),
    "unigram of a class": ("llama", "unigram", {"tokenizer_config.json": LEGACY}),
    "sentencepiece of a class": ("qwen3", "bpe", {"tokenizer_config.json": LLAMA}),
    "sentencepiece and a decoder of added tokens": ("mistral", "bpe", DECODER),
    "tokenizer.json": ("llama", "json", {}),
    "tokenizer.json and a class of the family": (
        "qwen3", "json", {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<end>"}},
    ),
    "tokenizer.json of any class": (
        "qwen3", "json", {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}},
    ),
    "tokenizer.json of llama's class": ("llama", "json", {"tokenizer_config.json": LLAMA}),
    "tokenizer.json and added tokens": ("olmo2", "json", {"added_tokens.json": {"<extra>": 390}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "text.txt").write_text(TEXT)
    for kind, size in (("bpe", 45), ("unigram", 34)):
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"), model_prefix=str(folder / kind), vocab_size=size, model_type=kind,
            minloglevel=2,
        )  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(str(folder / "json"))
    return {kind: folder / f"{kind}.model" for kind in ("bpe", "unigram")} | {"json": folder / "json"}


@pytest.fixture
def make_directory(vocabularies, tmp_path):
    def make(family, kind, files, config=True):
        out = tmp_path / "source"
        out.mkdir()
        shutil.copy(vocabularies[kind], out / ("tokenizer.json" if kind == "json" else "tokenizer.model"))
        for name, content in files.items():
            (out / name).write_text(json.dumps(content))
        if config:
            (out / "config.json").write_text(json.dumps({"model_type": family}))
        return out

    return make


def ids_of(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(text, add_special_tokens=False) for text in SAMPLES]


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_tokenize_gives_the_ids_of_transformers(make_directory, kind, config):
    folder = make_directory(*DIRECTORIES[kind], config=config)
    expected = ids_of(folder)
    named = DIRECTORIES[kind][2] != {}
    for path in (folder, *([next(folder.glob("tokenizer.[jm]*"))] if named else [])):
        ours = load_tokenizer(path)
        assert [ours.encode(text) for text in SAMPLES] == expected
        assert ours.vocab_size > max(map(max, expected))


def test_a_guess_of_transformers_that_is_wrong_is_refused(make_directory):
    folder = make_directory("qwen3", "bpe", {})
    with pytest.raises(DataError, match=r"tokenizer\.model: transformers reads it as a Qwen2Tokenizer, with other ids"):
        load_tokenizer(folder)
    alone = load_tokenizer(folder / "tokenizer.model")
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    assert [alone.encode(text) for text in SAMPLES] == [pieces.encode(text) for text in SAMPLES]


def test_code_of_a_directory_is_not_run(make_directory):
    own = {"auto_map": {"AutoTokenizer": [None, "tokenization_mine.Mine"]}, "tokenizer_class": "Mine"}
    folder = make_directory("llama", "json", {"tokenizer_config.json": own})
    (folder / "tokenization_mine.py").write_text("raise SystemExit('ran')")
    try:
        ours = load_tokenizer(folder)
    except DataError as e:
        assert "transformers cannot read its tokenizer" in str(e)  # noqa: PT017
    else:
        assert [ours.encode(text) for text in SAMPLES] == ids_of(folder)


def upcycled(source, out):
    """Upcycle to another family, whose config.json may lead AutoTokenizer to another class; returns what is said."""
    with open_sources([source]) as sources:
        plan = make_plan(sources, UpcycleSection(num_experts=2, top_k=2, method="copy"))
        return upcycle(sources, out, plan)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_result_of_another_family_keeps_the_ids(make_directory, tmp_path, kind):
    family, vocabulary, files = DIRECTORIES[kind]
    source = make_model(make_directory(family, vocabulary, files), {"family": family, **SHAPE})
    expected = ids_of(source)
    assert upcycled(source, tmp_path / "moe") is None
    assert ids_of(tmp_path / "moe") == expected


def test_a_conversion_keeps_the_ids(make_directory, tmp_path):
    """mistral's class of tokenizer is not llama's, which drops characters that are not in the vocabulary."""
    source = make_model(make_directory(*DIRECTORIES["sentencepiece of a class"]), {"family": "llama", **SHAPE})
    expected = ids_of(source)
    with open_checkpoint(source) as checkpoint:
        assert convert(checkpoint, tmp_path / "out", plan_conversion(checkpoint, "mistral")) is None
    assert ids_of(tmp_path / "out") == expected
    (tmp_path / "out/tokenizer_config.json").write_text(json.dumps(LLAMA))
    shutil.copy(source / "tokenizer.model", tmp_path / "out")
    (tmp_path / "out/tokenizer.json").unlink()
    assert ids_of(tmp_path / "out") != expected  # what copying the files alone would have given


def make_model(folder, section):
    model = ModelSection(**section)
    with CheckpointWriter(folder.parent / "model", model, torch.float32) as writer:
        for name, shape in expected_tensors(model).items():
            writer.write(name, torch.ones(shape))
    for path in (folder.parent / "model").iterdir():
        shutil.copy(path, folder)
    return folder


def test_a_tokenizer_that_transformers_misreads_is_left_out_and_it_is_said(make_directory, tmp_path):
    source = make_model(make_directory("qwen3", "bpe", {}), {"family": "qwen3", **SHAPE})
    note = upcycled(source, tmp_path / "moe")
    assert note is not None
    assert "the tokenizer was left out" in note
    assert "Qwen2Tokenizer" in note
    assert not (tmp_path / "moe/tokenizer.model").exists()


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_a_text_that_a_tokenizer_without_unk_cannot_encode_is_a_data_error(tmp_path, kind):
    tokenizer = Tokenizer(models.WordLevel({"fox": 0}, unk_token="?") if kind == "WordLevel" else models.Unigram())
    if kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram([("f", -1.0), ("ox", -1.0)]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot encode the document that starts with 'zebra'"):
        load_tokenizer(tmp_path / "tokenizer.json").encode("zebra")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_text_at_which_the_library_panics_is_a_data_error(tmp_path, kind):
    tokenizer = Tokenizer(models.WordLevel({"fox": 0, "?": 1}, unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if kind == "directory":
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"cannot encode the document that starts with 'aaaa.*retry-limit"):
        loaded.encode("a" * 40 + "b")


def test_ids_that_no_dataset_can_hold_are_refused(tmp_path):
    Tokenizer(models.WordLevel({"fox": 2**31, "?": 1}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("fox")
    with pytest.raises(DataError, match=r"tokenizer\.json: has token ids up to 2147483648; .* below 2147483648"):
        tokenize((tmp_path / "text.txt",), tmp_path / "tokenizer.json", tmp_path / "out", append_eod=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tokenizer.json"]


def test_a_git_lfs_pointer_is_named(make_directory):
    folder = make_directory("llama", "json", {})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"
    (folder / "tokenizer.json").write_text(pointer)
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(DataError, match=r"tokenizer\.json: is a Git LFS pointer"):
            load_tokenizer(path)
