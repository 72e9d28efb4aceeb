"""Torch files that torch.save did not write as they are: equal to torch.load with weights_only, or refused."""

import io
import json
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout.storage.tensor_files import open_tensor_file


def tensors():
    torch.manual_seed(0)
    state = {
        f"layer.{i}.weight": torch.randn(3 + i, 5).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(9)
    }
    state["transposed"] = torch.randn(6, 4).t()
    state["tail"] = torch.randn(7, 2)[3:]
    state["negative"] = torch.complex(torch.randn(3, 2), torch.randn(3, 2)).conj().imag
    return state


def rewritten(path, *, align=1, compress=zipfile.ZIP_STORED, reverse=False, edit=None, renamed="archive"):
    """Pack the archive at `path` anew with Python's zipfile, as tools that edit checkpoints do."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename.partition("/")[2], old.read(info)) for info in old.infolist()]
    if reverse:
        entries = entries[:1] + entries[:0:-1]
    with zipfile.ZipFile(path, "w", compress) as new:
        for name, data in entries:
            if edit is not None:
                data = edit(name, data)
            info = zipfile.ZipInfo(f"{renamed}/{name}")
            info.compress_type = compress
            start = new.fp.tell() + 30 + len(info.filename)
            if align > 1:
                padding = -(start + 4) % align
                info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
            new.writestr(info, data)
    return path


def assert_same_as_torch(path):
    expected = torch.load(path, weights_only=True)
    file = open_tensor_file(path)
    assert set(file.tensors) == set(expected)
    for name, tensor in expected.items():
        rows = file.read_rows(name, 0, len(tensor))
        assert torch.equal(rows, tensor), name
        assert not rows.is_neg()
        assert torch.equal(file.read_rows(name, 1, 2), tensor[1:2]), name
    file.close()


@pytest.fixture
def saved(tmp_path):
    torch.save(tensors(), tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("align", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("reverse", [False, True])
def test_entries_are_read_from_where_the_archive_has_them(saved, align, reverse):
    assert_same_as_torch(rewritten(saved, align=align, reverse=reverse))


def test_as_torch_writes_it(saved):
    assert_same_as_torch(saved)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_negative_bit_is_a_sign(tmp_path, legacy):
    x = torch.complex(torch.randn(3, 2), torch.randn(3, 2)).conj().imag
    assert x.is_neg()
    torch.save({"x": x}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    assert_same_as_torch(tmp_path / "a.pt")


def test_compressed_entries_are_refused_with_what_to_do(saved):
    rewritten(saved, compress=zipfile.ZIP_DEFLATED)
    torch.load(saved, weights_only=True)
    with pytest.raises(CheckpointError, match=r"a\.pt: archive/.* is compressed.*save it again with torch\.save"):
        open_tensor_file(saved)


def test_another_byte_order_is_refused(saved):
    rewritten(saved, edit=lambda name, data: b"big" if name == "byteorder" else data)
    with pytest.raises(CheckpointError, match=r"a\.pt: was written on a big-endian machine"):
        open_tensor_file(saved)


def test_a_wrong_checksum_matters_as_little_as_to_torch(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_as_torch(tmp_path / "a.pt")


def pickled(state):
    """The pickle of a torch file with one tensor of six values, `state` being (offset, sizes, strides, numel)."""
    offset, sizes, strides, numel = state
    held = io.BytesIO()
    torch.save({"x": torch.arange(6.0)}, held)
    with zipfile.ZipFile(held) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        data = archive.read(name)
    number = lambda n: b"J" + struct.pack("<i", n)  # noqa: E731
    row = lambda values: b"(" + b"".join(map(number, values)) + b"t"  # noqa: E731
    data = data.replace(b"K\x06tq\x07Q", number(numel) + b"tq\x07Q")
    return data.replace(b"K\x00K\x06\x85q\x08K\x01\x85q\t", number(offset) + row(sizes) + row(strides))


CRAFTED = {
    "plain": (0, (2, 3), (3, 1), 6),
    "overlapping rows": (1, (2, 4), (1, 1), 6),
    "expanded": (2, (4, 3), (0, 1), 6),
    "too far": (1, (2, 3), (3, 1), 6),
    "strides too large": (0, (2, 3), (300, 1), 6),
    "far strides": (0, (2, 3), (2**30, 2**30), 6),
    "negative strides": (5, (6,), (-1,), 6),
    "negative offset": (-1, (6,), (1,), 6),
    "negative size": (0, (-2, 3), (3, 1), 6),
    "storage too large": (0, (2, 600), (600, 1), 1200),
    "storage too small": (0, (2, 2), (2, 1), 3),
    "negative storage": (0, (2, 2), (2, 1), -6),
}


@pytest.mark.parametrize("state", CRAFTED.values(), ids=CRAFTED)
def test_crafted_strides_and_sizes_are_what_torch_says_or_refused(tmp_path, state):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.arange(6.0)}, path)
    rewritten(path, edit=lambda name, data: pickled(state) if name == "data.pkl" else data)
    try:
        torch.load(path, weights_only=True)["x"].sum()
    except Exception:
        with pytest.raises(CheckpointError, match=r"a\.pt: "):
            open_tensor_file(path)
    else:
        assert_same_as_torch(path)


def test_tensors_without_values_are_refused(tmp_path):
    torch.save({"x": torch.empty(3, 3, device="meta")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: x: "):
        open_tensor_file(tmp_path / "a.pt")


def test_tensors_of_a_gpu_are_read(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.arange(6.0), "y": torch.ones(2, 2)}, path)
    cpu, cuda = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    rewritten(path, edit=lambda name, data: data.replace(cpu, cuda) if name == "data.pkl" else data)
    file = open_tensor_file(path)
    assert torch.equal(file.read_rows("x", 0, 6), torch.arange(6.0))
    assert torch.equal(file.read_rows("y", 0, 2), torch.ones(2, 2))


class Command:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("content", [Command(), {"x": Command()}])
def test_torchs_advice_to_run_what_a_file_holds_is_not_repeated(tmp_path, legacy, content):
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"a\.pt: holds more than tensors \(print\)") as error:
        open_tensor_file(tmp_path / "a.pt")
    assert "weights_only" not in str(error.value)
    (tmp_path / "b.pt").write_bytes(b"\x80\x02not a pickle")
    with pytest.raises(CheckpointError, match=r"b\.pt: damaged") as error:
        open_tensor_file(tmp_path / "b.pt")
    assert not {"weights_only", "torch.load"} & set(str(error.value).split())
    assert json.dumps(str(error.value)).count("\\n") == 0


def test_torchscript_is_named(tmp_path):
    # In a process of its own: what other tests did to torch in this one can make its compiler save undefined tensors.
    script = "import sys, torch; torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.pt"], check=True)
    with pytest.raises(CheckpointError, match=r"a\.pt: is a TorchScript archive"):
        open_tensor_file(tmp_path / "a.pt")
