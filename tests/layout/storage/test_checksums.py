import pytest
import torch
import xxhash

from spes_mega.errors import CheckpointError
from spes_mega.layout.storage.checksums import CHECKSUMS, TensorChecksums, check_files, checksum_of
from spes_mega.layout.storage.safetensors_format import pack_header
from spes_mega.layout.storage.tensor_bytes import bytes_of

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5, dtype=torch.int8), "c": torch.ones(0)}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.safetensors"
    header = pack_header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()})
    path.write_bytes(header + b"".join(bytes_of(tensor) for tensor in TENSORS.values()))
    return path


def of_file(checksums, path):
    with path.open("rb") as file:
        return checksums.of_file(file.fileno(), "x")


def test_rows_of_several_tensors_in_turn_give_the_checksum_of_the_file(path, monkeypatch):
    checksums = TensorChecksums()
    data = bytes_of(TENSORS["a"])
    checksums.wrote("a", 0, data[:24])
    checksums.wrote("b", 0, bytes_of(TENSORS["b"]))
    checksums.wrote("a", 24, data[24:])
    expected = checksum_of(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")  # what was written is not read again
    assert of_file(checksums, path) == expected
    assert checksum_of(path) != expected


def test_what_comes_in_another_order_or_not_at_all_is_read_again(path):
    checksums = TensorChecksums()
    data = bytes_of(TENSORS["a"])
    checksums.wrote("a", 24, data[24:])
    checksums.wrote("a", 0, data[:24])
    assert of_file(checksums, path) == checksum_of(path)


def test_every_byte_counts(path):
    expected, content = checksum_of(path), path.read_bytes()
    for at in range(8, len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            assert checksum_of(path) != expected, at
        except CheckpointError:
            assert at < len(content) - 53, "only a header can be malformed"
    path.write_bytes(content + b"more")
    with pytest.raises(CheckpointError, match="the header speaks of"):
        checksum_of(path)


def test_another_file_has_the_checksum_of_its_bytes_and_names_in_the_list_stay_in_the_directory(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/text").write_text("text")
    assert checksum_of(tmp_path / "d/text") == xxhash.xxh3_64_hexdigest(b"text")
    for listed in ('{"text": "00"}', '{"../d": "00"}', "[]", "{"):
        (tmp_path / "d" / CHECKSUMS).write_text(listed)
        with pytest.raises(CheckpointError, match="damaged"):
            check_files(tmp_path / "d")
