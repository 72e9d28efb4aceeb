import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_mega.errors import CheckpointError
from spes_mega.layout import bytes_of, header_length, pack_header, parse_header

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(dtypes, shapes), max_size=6))
@settings(max_examples=60, deadline=None)
def test_what_is_packed_is_read_alike_by_us_and_by_the_safetensors_library(specs):
    specs.pop("__metadata__", None)
    tensors = {name: torch.arange(math.prod(shape)).reshape(shape).to(dtype) for name, (dtype, shape) in specs.items()}
    packed = pack_header(specs, {"format": "pt"})
    data = packed + b"".join(bytes(bytes_of(t)) for t in tensors.values())
    theirs = safetensors.torch.load(data)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in theirs.items()} == specs
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    header = parse_header(packed[8:], "test")
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == specs
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == len(data)
    assert header.data_start % 8 == 0


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1}', "'a': dtype, shape and two data_offsets expected"),
        (b'{"a": {}, "a": {}}', "'a' stands there twice"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"a": entry(dtype="F4")}, "'a': dtype 'F4' is not supported"),
        ({"a": entry(dtype=["F32"])}, "'a': dtype"),
        ({"a": entry(shape=(-2,))}, "whole numbers"),
        ({"a": entry(shape=(True, 2))}, "whole numbers"),
        ({"a": entry(shape=(2.0,))}, "whole numbers"),
        ({"a": entry(shape=(2**63, 0))}, "whole numbers"),
        ({"a": entry(shape=(1,) * 9)}, "at most 8 axes"),
        ({"a": entry(shape=(3,))}, "'a': 8 bytes for F32 of shape .3., which takes 12"),
        ({"a": entry(offsets=(8, 0))}, "'a': -8 bytes"),
        ({"a": entry(offsets=(4, 12))}, "'a': starts at byte 4 where byte 0 was expected"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "'b': starts at byte 4 where byte 8 was expected"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, "'b': starts at byte 12 where byte 8 was expected"),
    ],
)
def test_broken_headers_are_refused_by_name(header, said):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    for source in ("PEER", "ANOTHER"):
        with pytest.raises(CheckpointError, match=f"^{source}: .*{said}"):
            parse_header(text, source)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (b"short", "truncated"),
        ((1).to_bytes(8, "little"), "not a safetensors file"),
        ((100_000_001).to_bytes(8, "little"), "not a safetensors file"),
    ],
)
def test_absurd_lengths_are_refused(prefix, said):
    with pytest.raises(CheckpointError, match=said):
        header_length(prefix, "PEER")
