import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spes_mega.errors import CheckpointError
from spes_mega.layout import EMBEDDING, FINAL_NORM, CheckpointWriter, expected_tensors, open_checkpoint

OPEN_FILES = Path("/proc/self/fd")


def test_rows_in_any_order_from_several_threads(section, make_checkpoint, tmp_path):
    path, tensors = make_checkpoint(section("qwen3_moe"))
    pieces = [(n, row) for n, t in tensors.items() for row in range(0, t.shape[0], 5)]
    random.Random(1).shuffle(pieces)
    out = tmp_path / "rows"
    with CheckpointWriter(out, section("qwen3_moe"), torch.float32, max_shard_bytes=9_000) as writer:

        def work(part):
            for name, row in part:
                writer.write_rows(name, row, tensors[name][row : row + 5])

        threads = [threading.Thread(target=work, args=(pieces[k::3],)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with open_checkpoint(out) as written:
        assert all(torch.equal(written.read(name), tensor) for name, tensor in tensors.items())
    assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()


def test_shards_keep_to_their_size_and_the_index_is_complete(section, make_checkpoint):
    path, tensors = make_checkpoint(section("mixtral"), max_shard_bytes=9_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in path.glob("*.safetensors"):
        held = load_file(file)
        sizes[file.name] = sum(t.nbytes for t in held.values())
        assert len(held) == 1 or sizes[file.name] <= 9_000
        assert dict.fromkeys(held, file.name).items() <= index["weight_map"].items()
    assert len(index["weight_map"]) == len(tensors)
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_dtype_may_differ_by_name(section, make_checkpoint, tmp_path):
    model = section("llama")
    _, tensors = make_checkpoint(model)
    kind = lambda name: torch.float32 if name.endswith("norm.weight") else torch.bfloat16  # noqa: E731
    with CheckpointWriter(tmp_path / "mixed", model, kind) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    with open_checkpoint(tmp_path / "mixed") as mixed:
        assert mixed.config["dtype"] == "bfloat16"
        for name, tensor in tensors.items():
            assert torch.equal(mixed.read(name), tensor.to(kind(name)))


def write_all_but(left_out, tensors, out, model):
    """With nothing left out, the last row of the final norm is."""
    with CheckpointWriter(out, model, torch.float32) as writer:
        for name, tensor in tensors.items():
            if name == FINAL_NORM and not left_out:
                writer.write_rows(name, 0, tensor[:31])
            elif name not in left_out:
                writer.write(name, tensor)


def test_an_incomplete_checkpoint_is_never_seen(section, make_checkpoint, tmp_path):
    model = section("llama")
    _, tensors = make_checkpoint(model)
    before = set(tmp_path.iterdir())
    cases = [({EMBEDDING}, EMBEDDING + " was not filled completely .rows none"), (set(), FINAL_NORM + " .*0, 31")]
    for left_out, said in cases:
        with pytest.raises(CheckpointError, match=said):
            write_all_but(left_out, tensors, tmp_path / "out", model)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "out", model, torch.float32):
        raise KeyboardInterrupt
    assert set(tmp_path.iterdir()) == before


def test_no_file_stays_open_after_a_failure(section, tmp_path):
    before = len(list(OPEN_FILES.iterdir()))
    for _ in range(3):
        with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out", section("llama"), torch.float32):
            raise RuntimeError
    assert len(list(OPEN_FILES.iterdir())) == before


@pytest.mark.parametrize(
    ("name", "start", "shape", "said"),
    [
        ("ghost", 0, (1,), "ghost: not a tensor of this model"),
        (EMBEDDING, 100, (4, 32), "rows 100..104"),
        (EMBEDDING, -1, (4, 32), "rows -1..3"),
        (EMBEDDING, 0, (4, 31), "do not fit"),
    ],
)
def test_wrong_rows_are_refused(section, tmp_path, name, start, shape, said):
    with (
        pytest.raises(CheckpointError, match=said),
        CheckpointWriter(tmp_path / "out", section("llama"), torch.float32) as writer,
    ):
        writer.write_rows(name, start, torch.zeros(shape))


def test_a_part_is_not_taken_for_a_whole(section, tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"shape \[4, 32\], expected \[103, 32\]"),
        CheckpointWriter(tmp_path / "out", section("llama"), torch.float32) as writer,
    ):
        writer.write(EMBEDDING, torch.zeros(4, 32))


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        (torch.float16, torch.tensor(1e6), "fp16; store it as bf16 or fp32"),
        (torch.float16, torch.tensor(1e6, dtype=torch.bfloat16), "fp16; store it as bf16 or fp32"),
        (
            torch.bfloat16,
            torch.tensor(3.4e38),
            "bf16; store it as fp32",
        ),
    ],
)
def test_overflow_is_refused(section, tmp_path, dtype, value, said):
    with (
        pytest.raises(CheckpointError, match=rf"model.norm.weight: has values too large for {said}"),
        CheckpointWriter(tmp_path / "out", section("llama"), dtype) as writer,
    ):
        writer.write(FINAL_NORM, value.expand(32))


def test_a_link_to_an_empty_folder_elsewhere_is_filled(section, tmp_path):
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big_disk")
    model = section("llama")
    with CheckpointWriter(tmp_path / "out", model, torch.float32) as writer:
        for name, shape in expected_tensors(model).items():
            writer.write(name, torch.ones(shape))
    assert (tmp_path / "out").is_symlink()
    with open_checkpoint(tmp_path / "big_disk") as checkpoint:
        assert float(checkpoint.read(FINAL_NORM).sum()) == 32


def fill(writer, model):
    for name, shape in expected_tensors(model).items():
        writer.write(name, torch.ones(shape))


def test_an_empty_directory_is_written_into_and_not_replaced(section, tmp_path, monkeypatch):
    """As a mount point, or the current folder, it could not be."""
    model, out = section("llama"), tmp_path / "volume"
    out.mkdir()
    (out / "lost+found").mkdir()
    before = out.stat().st_ino
    with pytest.raises(CheckpointError, match="was not filled"), CheckpointWriter(out, model, torch.float32):
        pass
    assert [path.name for path in out.iterdir()] == ["lost+found"]
    monkeypatch.chdir(out)
    with CheckpointWriter(Path(), model, torch.float32) as writer:
        fill(writer, model)
    assert out.stat().st_ino == before
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "lost+found", "model.safetensors"]
    with open_checkpoint(out) as written:
        assert written.read(EMBEDDING).eq(1).all()


def test_what_appears_in_the_directory_meanwhile_is_not_overwritten(section, tmp_path):
    model, out = section("llama"), tmp_path / "volume"
    out.mkdir()
    said = r"volume/model\.safetensors: was made by somebody else"

    def interrupted():
        with CheckpointWriter(out, model, torch.float32) as writer:
            fill(writer, model)
            (out / "model.safetensors").write_text("theirs")

    with pytest.raises(CheckpointError, match=said):
        interrupted()
    assert [path.read_text() for path in out.iterdir()] == ["theirs"]


ON_A_VOLUME = """
import sys, torch
from pathlib import Path
from spes_mega.errors import NoSpaceError
from spes_mega.layout import CheckpointWriter, expected_tensors, open_checkpoint
from spes_mega.recipe import ModelSection
shape = dict(family="llama", num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=48)
model = ModelSection(vocab_size=64, **shape)
with CheckpointWriter(Path(sys.argv[1]), model, torch.float32) as writer:
    for name, shape_of in expected_tensors(model).items():
        writer.write(name, torch.ones(shape_of))
open_checkpoint(Path(sys.argv[1])).close()
try:
    CheckpointWriter(Path(sys.argv[2]), ModelSection(vocab_size=65536, **shape), torch.float32)
except NoSpaceError as e:
    print(e)
"""


def test_a_mounted_volume_is_written_to_and_its_own_room_counts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    mounts = " && ".join(f"mount -t tmpfs -o size=1m none {tmp_path / name}" for name in ("a", "b"))
    inside = ["unshare", "-rm", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mounts], capture_output=True).returncode:
        pytest.skip("this machine does not let a user mount anything")
    command = shlex.join([sys.executable, "-c", ON_A_VOLUME, str(tmp_path / "a"), str(tmp_path / "b")])
    done = subprocess.run([*inside, f"{mounts} && {command}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"/b: needs [\d,]+ bytes of disk space, [1-9]\d{2},\d{3} are free|1,048,576 are free", done.stdout)


def test_an_existing_directory_is_kept(section, make_checkpoint, tmp_path):
    path, tensors = make_checkpoint(section("llama"))
    with pytest.raises(CheckpointError, match="exists already"):
        CheckpointWriter(path, section("llama"), torch.float32)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        CheckpointWriter(tmp_path / "file", section("llama"), torch.float32)
    (tmp_path / "empty").mkdir()
    make_checkpoint(section("llama"), "empty")
    with open_checkpoint(tmp_path / "empty") as written:
        assert torch.equal(written.read(EMBEDDING), tensors[EMBEDDING])


def test_too_little_space_is_found_before_anything_is_written(section, tmp_path):
    with pytest.raises(CheckpointError, match="bytes of disk space"):
        CheckpointWriter(tmp_path / "out", section("llama", vocab_size=2**50), torch.float32)
    assert list(tmp_path.iterdir()) == []


COMPANIONS = (
    "additional_chat_templates/tools.jinja", "tokenizer.json", "tokenizer.model", "generation_config.json",
    "tekken.json", "tokenizer.4.0.0.json", "tokenizer.model.v3", "qwen.tiktoken", "added_tokens.json",
)  # fmt: skip


def test_companions_and_texts_come_along(section, make_checkpoint, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "additional_chat_templates").mkdir()
    for name in (*COMPANIONS, "notes.txt", "additional_chat_templates/notes.txt"):
        (source / name).write_text(name)
    model = section("llama")
    _, tensors = make_checkpoint(model)
    with CheckpointWriter(tmp_path / "out", model, torch.float32, copy_from=source) as writer:
        writer.write_text("extra.json", "{}")
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    out = tmp_path / "out"
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        *COMPANIONS, "extra.json", "config.json", "model.safetensors",
    }  # fmt: skip
    assert (out / COMPANIONS[0]).read_text() == COMPANIONS[0]
