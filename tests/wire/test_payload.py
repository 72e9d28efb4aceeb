import os
import struct
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_mega.layout.storage.rows import row_slices
from spes_mega.layout.storage.safetensors_format import pack_header
from spes_mega.layout.storage.tensor_bytes import bytes_of
from spes_mega.outer.codecs import codec_named
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.payload import (
    PayloadWriter,
    StoredPayload,
    write_payload,
)
from spes_mega.wire.tensor_specs import data_bytes, forms_of, header_limit, in_fp32, payload_header

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}
FORMS = in_fp32(SHAPES)
MIXED = forms_of(SHAPES, {"a": codec_named("int8"), "b": codec_named("int8"), "c": codec_named("bf16")}.__getitem__)
TENSORS = {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def stored():
    with tempfile.TemporaryFile() as file:
        write_payload(file, FORMS, TENSORS.items(), {"tokens": "7"})
        yield file


def test_round_trip_by_tensor_and_by_rows(stored):
    payload = StoredPayload(stored, "x")
    assert payload.shapes == SHAPES
    assert payload.header.metadata == {"tokens": "7"}
    for name, tensor in TENSORS.items():
        assert torch.equal(payload.read(name), tensor)
        assert torch.equal(payload.read_rows(name, 1, 2), tensor[1:2])
    payload.check(FORMS)
    payload.check_finite()
    header = payload_header(FORMS, {"tokens": "7"})
    assert payload.size == len(header) + data_bytes(FORMS)
    assert len(header) < header_limit(FORMS)


def test_tensors_out_of_turn_are_refused_where_they_are_written():
    with tempfile.TemporaryFile() as file:
        with pytest.raises(ValueError, match=r"tensor b of shape \(5,\) given where .*'a'"):
            write_payload(file, FORMS, [("b", TENSORS["b"])], {})
        with pytest.raises(ValueError, match="tensor b was not given"):
            write_payload(file, FORMS, [("a", TENSORS["a"])], {})


def test_codecs_of_any_mixture_go_into_one_payload_and_are_known_by_their_dtypes():
    with tempfile.TemporaryFile() as file:
        size = write_payload(file, MIXED, TENSORS.items(), {})
        payload = StoredPayload(file, "x")
        assert payload.forms == MIXED
        assert payload.size == size == len(payload_header(MIXED)) + data_bytes(MIXED)
        assert data_bytes(MIXED) == (4 * 3 + 12) + (4 + 5) + 2 * 8
        payload.check(MIXED)
        payload.check_finite()
        for name, tensor in TENSORS.items():
            wire, scale = MIXED[name].codec.encode(tensor)
            decoded = MIXED[name].codec.decode(wire, scale)
            assert torch.equal(payload.read(name), decoded)
            assert torch.equal(payload.read_rows(name, 1, 2), decoded[1:2])
            raw = b"".join(payload.read_bytes(*part) for part in payload.raw(name))
            assert raw.endswith(bytes_of(wire))
            assert raw[: -wire.nbytes] == (b"" if scale is None else bytes(bytes_of(scale)))
        with pytest.raises(PayloadError, match=r"x: tensor 'a\.scale' was not expected"):
            payload.check(FORMS)
        with pytest.raises(PayloadError, match=r"x: tensor a\.scale is missing"):
            StoredPayload(stored_in_fp32(file), "x").check(MIXED)


def stored_in_fp32(file):
    file.truncate(0)
    write_payload(file, FORMS, TENSORS.items(), {})
    return file


def test_rows_may_be_written_in_any_order_and_what_goes_on_the_wire_is_returned():
    with tempfile.TemporaryFile() as file:
        writer = PayloadWriter(file, MIXED)
        second = writer.write_rows("a", 1, TENSORS["a"][1:])
        first = writer.write_rows("a", 0, TENSORS["a"][:1])
        payload = StoredPayload(file, "x")
        decoded = [MIXED["a"].codec.decode(*encoded) for encoded in (first, second)]
        assert torch.equal(payload.read("a"), torch.cat(decoded))
        assert payload.read("b").tolist() == [0] * 5  # never written


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 3e38])
def test_scales_that_cannot_be_are_named(bad):
    with tempfile.TemporaryFile() as file:
        write_payload(file, MIXED, TENSORS.items(), {})
        payload = StoredPayload(file, "x")
        offset, _ = next(payload.raw("a"))
        os.pwrite(file.fileno(), struct.pack("<f", bad), offset + 4)
        with pytest.raises(PayloadError, match="x: a has a scale that is negative or gives infinite values"):
            payload.check_finite()


def test_bf16_values_that_are_not_finite_are_named():
    with tempfile.TemporaryFile() as file:
        write_payload(file, MIXED, (TENSORS | {"c": torch.full((2, 2, 2), torch.inf)}).items(), {})
        with pytest.raises(PayloadError, match="x: c has NaN or infinite values"):
            StoredPayload(file, "x").check_finite()


def test_a_dtype_that_no_codec_gives_is_named():
    with tempfile.TemporaryFile() as file:
        file.write(pack_header({"a": (torch.float16, (2,))}) + bytes(4))
        file.flush()
        with pytest.raises(PayloadError, match=r"x: 'a' is torch\.float16, which no codec gives"):
            StoredPayload(file, "x")


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (SHAPES | {"d": (1,)}, "tensor d is missing"),
        ({"a": (3, 4), "b": (5,)}, "tensor 'c' was not expected"),
        (SHAPES | {"a": (4, 3)}, r"a has shape \(3, 4\), expected \(4, 3\)"),
    ],
)
def test_other_names_and_shapes_are_named(stored, expected, message):
    with pytest.raises(PayloadError, match=message):
        StoredPayload(stored, "x").check(in_fp32(expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named(bad):
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    tensors["c"][1, 1, 1] = bad
    with tempfile.TemporaryFile() as file:
        write_payload(file, FORMS, tensors.items(), {})
        with pytest.raises(PayloadError, match="x: c has NaN or infinite values"):
            StoredPayload(file, "x").check_finite()


def test_a_file_of_another_length_than_its_header_says_is_refused(stored):
    stored.seek(0, 2)
    stored.write(b"1234")
    stored.flush()
    with pytest.raises(PayloadError, match="bytes, the header speaks of"):
        StoredPayload(stored, "x")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_payload_or_a_payload_error(content):
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(PayloadError):
            StoredPayload(file, "x").check(FORMS)


@given(st.integers(1, 50), st.integers(1, 30), st.integers(1, 5))
def test_row_slices_are_even_and_cover_all_rows_and_at_most_half_more_than_the_budget(rows, columns, factor):
    slices = list(row_slices((rows, columns), factor, budget=400))
    assert [row for start, stop in slices for row in range(start, stop)] == list(range(rows))
    for start, stop in slices:
        assert (stop - start - 1) * columns * 4 * factor < 600
    assert len({stop - start for start, stop in slices[:-1]}) <= 1
