"""Every path that a command takes, in every way that a path can be bad: one line with the path, and the exit code."""

import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from spes_mega.cli import main
from spes_mega.layout import CheckpointWriter
from spes_mega.layout.initialize import initial_tensor
from spes_mega.recipe import Recipe, load_recipe

MODEL = {
    "family": "llama", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "ffn_hidden_size": 16, "vocab_size": 32, "max_seq_len": 64,
}  # fmt: skip
SECONDS = 30

# how a path is bad, and what makes it so
KINDS: dict[str, Callable[[Path], Path]] = {
    "long": lambda place: place / ("n" * 300),
    "very long": lambda place: place.joinpath(*["d" * 200] * 30),
    "loop": lambda place: linked(place / "loop", place / "loop"),
    "below a loop": lambda place: linked(place / "loop", place / "loop") / "x",
    "below a file": lambda place: made(place / "file") / "x",
    "dangling": lambda place: linked(place / "dangling", place / "nowhere"),
    "below a dangling link": lambda place: linked(place / "dangling", place / "nowhere") / "x",
    "missing": lambda place: place / "missing",
    "undecodable": lambda place: place / os.fsdecode(b"\xff"),
    "directory": lambda place: directory(place / "directory"),
    "empty file": lambda place: made(place / "empty"),
    "pipe": lambda place: piped(place / "pipe"),
    "socket": lambda place: bound(place / "socket"),
    "device": lambda _: Path("/dev/full"),
}

READ = {
    "recipe": ("recipe {}", 3),
    "overlay": ("recipe {recipe} --overlay {}", 3),
    "plan": ("plan {}", 3),
    "hub": ("hub {} --state {place}/state --listen 127.0.0.1:0", 3),
    "hub init": ("hub {recipe} --init {} --state {place}/state --listen 127.0.0.1:0", 4),
    "hub keys": ("hub {recipe} --keys {} --state {place}/state --listen 127.0.0.1:0", 9),
    "hub token": ("hub {recipe} --token-file {} --state {place}/state --listen 127.0.0.1:0", 9),
    "drain": ("hub {recipe} --drain --state {}", 8),
    "status keys": ("status --hub 127.0.0.1:1 --keys {}", 9),
    "status token": ("status --hub 127.0.0.1:1 --token-file {}", 9),
    "launch": ("launch {}", 3),
    "launch keys": ("launch {recipe} --data {data} --hub 127.0.0.1:1 --keys {}", 9),
    "launch token": ("launch {recipe} --data {data} --hub 127.0.0.1:1 --token-file {}", 9),
    "tokenize": ("tokenize {}.jsonl --tokenizer {tokenizer} --out {place}/out", 5),
    "tokenizer": ("tokenize {text} --tokenizer {} --out {place}/out", 5),
    "tokenizer.json": ("tokenize {text} --tokenizer {}.json --out {place}/out", 5),
    "tokenizer.model": ("tokenize {text} --tokenizer {}.model --out {place}/out", 5),
    "upcycle": ("upcycle {} --out {place}/out", 4),
    "upcycle config": ("upcycle {dense} --config {} --out {place}/out", 4),
    "upcycle recipe": ("upcycle {dense} --recipe {} --out {place}/out", 3),
    "calibration": ("upcycle {dense} --router-init kmeans --calibration {} --out {place}/out", 5),
    "convert": ("convert {} --out {place}/out", 4),
    "convert config": ("convert {dense} --config {} --out {place}/out", 4),
    "safetensors": ("convert {}.safetensors --config {dense}/config.json --out {place}/out", 4),
    "torch file": ("convert {}.pt --config {dense}/config.json --out {place}/out", 4),
    "inspect": ("inspect {}", 4),
    "inspect config": ("inspect {dense} --config {}", 4),
    "evaluate": ("evaluate {} --data {data}", 4),
    "evaluate data": ("evaluate {dense} --data {}", 5),
    "keys node": ("keys node {} 0", 9),
    "keys hub": ("keys hub {} --host h", 9),
}
WRITE = {
    "tokenize": ("tokenize {text} --tokenizer {tokenizer} --no-append-eod --out {}/x", 5),
    "upcycle": ("upcycle {dense} --method copy --out {}", 4),
    "convert": ("convert {dense} --out {}", 4),
    "inspect": ("inspect {moe} --plot {}/x.png", 4),
    "keys": ("keys new --nodes 1 --host h --out {}", 9),
    "demo": ("demo --out {}", 1),
}
UNWRITABLE = ("long", "very long", "loop", "below a loop", "below a file", "below a dangling link")


def made(path):
    path.touch()
    return path


def linked(path, target):
    path.symlink_to(target)
    return path


def directory(path):
    path.mkdir()
    return path


def piped(path):
    os.mkfifo(path)
    return path


def bound(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    return path


@pytest.fixture(scope="module")
def good():
    """One good example of everything, readable for all."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    with tempfile.TemporaryDirectory(prefix="spes-") as name:
        root = Path(name)
        root.chmod(0o755)
        paths = {key: root / key for key in ("dense", "moe", "data")}
        paths |= {"recipe": root / "recipe.yaml", "tokenizer": root / "tokenizer.json", "text": root / "text.txt"}
        moe = MODEL | {"family": "qwen3_moe", "num_experts": 2, "top_k": 2, "expert_hidden_size": 16}
        paths["recipe"].write_text(yaml.safe_dump({"model": moe, "train": {"seq_len": 8}}))
        write_checkpoint(paths["moe"], load_recipe(paths["recipe"]))
        write_checkpoint(paths["dense"], Recipe.model_validate({"model": MODEL, "train": {"seq_len": 8}}))
        Tokenizer(WordLevel({"a": 0, "<u>": 1}, unk_token="<u>")).save(str(paths["tokenizer"]))
        paths["text"].write_text("a " * 100)
        assert (
            run(f"tokenize {paths['text']} --tokenizer {paths['tokenizer']} --no-append-eod --out {paths['data']}") == 0
        )
        yield paths


def write_checkpoint(path, recipe):
    import torch

    with CheckpointWriter(path, recipe.model, torch.float32) as writer:
        for name in writer.names:
            writer.write(name, initial_tensor(recipe.model, name, writer.shape(name), 0))


@pytest.fixture
def place():
    """An empty directory that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="spes-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def run(line):
    with alarm(), pytest.raises(SystemExit) as ended:
        main(line.split(" "))
    return ended.value.code


@contextmanager
def alarm():
    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def filled(template, path, good, place):
    return template.replace("{}", str(path)).format(**good, place=place)


def check_told(told, path, expected, code):
    shown = str(path).encode(errors="backslashreplace").decode()
    assert "Traceback" not in told
    assert "fault of spes-mega" not in told
    if code != 2:  # click's own words begin with the usage
        assert told.count("\n") == 1, told
        assert code == expected, told
    assert shown in told or str(path).encode(errors="replace").decode().replace("?", "\ufffd") in told, told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ)
def test_what_cannot_be_read_is_told_in_one_line(name, kind, good, place, capfd):
    template, code = READ[name]
    path = KINDS[kind](place)
    before = {one.name for one in place.iterdir()}
    ended = run(filled(template, path, good, place))
    told = capfd.readouterr().err
    assert ended in (2, code), told
    check_told(told, path, code, ended)
    left = {one.name for one in place.iterdir()}
    assert left - {"state"} == before  # a hub that has no weights yet keeps its state directory


@pytest.mark.parametrize("kind", UNWRITABLE)
@pytest.mark.parametrize("name", WRITE)
def test_what_cannot_be_written_is_told_in_one_line(name, kind, good, place, capfd):
    template, code = WRITE[name]
    path = KINDS[kind](place)
    before = {one.name for one in place.iterdir()}
    ended = run(filled(template, path, good, place))
    check_told(capfd.readouterr().err, path, code, ended)
    assert {one.name for one in place.iterdir()} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_while_tokenizing_leaves_nothing(workers, good, place, capfd):
    """Limited by RLIMIT_FSIZE, which is a write error in the midst of the work as a full disk is."""
    text = place / "text.jsonl"
    text.write_text('{"text": "a"}\n' * 100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        ended = run(
            f"tokenize {text} --tokenizer {good['tokenizer']} --no-append-eod --workers {workers} --out {place}/out"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    told = capfd.readouterr().err
    assert (ended, told) == (5, f"error: {place}/out: cannot be written: File too large\n")
    assert [one.name for one in place.iterdir()] == ["text.jsonl"]


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("recipe {}/recipe.yaml", 3),
        ("hub {recipe} --drain --state {}/state", 8),
        ("status --hub 127.0.0.1:1 --keys {}/keys", 9),
        ("evaluate {dense} --data {}/data", 5),
        ("inspect {}/checkpoint", 4),
        ("tokenize {text} --tokenizer {}/tokenizer.json --out {place}/out", 5),
        ("tokenize {text} --tokenizer {tokenizer} --no-append-eod --out {}/out", 5),
        ("convert {dense} --out {}/out", 4),
        ("upcycle {dense} --method copy --out {}/out", 4),
        ("keys new --nodes 1 --host h --out {}/keys", 9),
        ("demo --out {}/demo", 1),
    ],
)
def test_a_private_folder_is_told_in_one_line(template, code, good, place, capfd):
    if os.geteuid() == 0:
        pytest.skip("root may enter every folder; the same errors come from the other kinds of paths")
    private = directory(place / "private")
    private.chmod(0)
    ended = run(filled(template, private, good, place))
    private.chmod(0o700)
    check_told(capfd.readouterr().err, private, code, ended)
