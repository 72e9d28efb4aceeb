"""Indexes that are not what they should be: one error, and nothing else on the console."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from spes_mega.data.token_stream import TokenStream
from spes_mega.errors import DataError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"


@pytest.fixture
def prefix(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/text.bin", dtype=np.uint16)
    builder.add_document(torch.arange(4), [4])
    builder.add_document(torch.arange(6), [6])
    builder.finalize(f"{tmp_path}/text.idx")
    return tmp_path / "text"


DAMAGES = {
    "text": (lambda raw: b"not an index at all, but long enough to have a header", "not the index"),
    "empty": (lambda raw: b"", "not the index"),
    "magic alone": (lambda raw: raw[:9], "not the index"),
    "version": (lambda raw: raw[:9] + b"\x07" + raw[10:], "not the index"),
    "dtype": (lambda raw: raw[:17] + b"\x63" + raw[18:], "not the index"),
    "truncated": (lambda raw: raw[:-3], "truncated"),
    "many sequences": (lambda raw: raw[:18] + b"\xff" * 8 + raw[26:], "truncated"),
    "no documents": (lambda raw: raw[:26] + bytes(8) + raw[34:], "not the index"),
    "floats": (lambda raw: raw[:17] + b"\x07" + raw[18:], "says that the tokens are floating-point numbers"),
    "another place": (lambda raw: raw[:50] + b"\x0c" + raw[51:], "damaged: sequence 1 has 6 tokens from byte 12"),
    "negative length": (lambda raw: raw[:34] + b"\xfc\xff\xff\xff\x0e" + raw[39:], "damaged: sequence 0 has -4 tokens"),
    "documents": (lambda raw: raw[:66] + b"\x07" + raw[67:], "damaged: its documents do not follow"),
    "negative document": (lambda raw: raw[:58] + b"\xff" * 8 + raw[66:], "damaged: its documents do not follow"),
}
OPEN = """
import sys
from spes_mega.errors import DataError
from spes_mega.data.token_stream import TokenStream
try:
    TokenStream(sys.argv[1])
except DataError as e:
    print(e)
"""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_a_data_error(prefix, damage):
    damaged, said = DAMAGES[damage]
    index = prefix.with_suffix(".idx")
    index.write_bytes(damaged(index.read_bytes()))
    with pytest.raises(DataError, match=rf"text\.idx: {said}"):
        TokenStream(prefix)


def test_nothing_else_is_on_the_console(prefix):
    prefix.with_suffix(".idx").write_bytes(DAMAGES["text"][0](b""))
    done = subprocess.run([sys.executable, "-c", OPEN, str(prefix)], capture_output=True, text=True)
    assert "text.idx: not the index" in done.stdout
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_git_lfs_pointer_is_named(prefix, suffix):
    prefix.with_suffix(suffix).write_bytes(POINTER)
    with pytest.raises(DataError, match=rf"text\{suffix}: is a Git LFS pointer"):
        TokenStream(prefix)
