import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_mega.outer.codecs import CODEC_OF_DTYPE, CODECS, codec_named

FINITE = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 8)), elements=FINITE)
LOSSY = [codec for codec in CODECS.values() if not codec.lossless]


def through(codec, rows):
    wire, scale = codec.encode(rows)
    assert wire.dtype == codec.wire_dtype
    assert (scale is not None) == codec.scaled
    return codec.decode(wire, scale)


def half_step(codec, rows):
    """The most by which a value may be off: half of the distance between two that can be sent."""
    if codec.name == "bf16":
        return (rows.abs() * 2.0**-8).clamp_min(2.0**-134)  # half of bf16's smallest number
    # and what rounding the scale to fp32 (below its normal range: to 2**-149) makes of 127 steps
    return rows.abs().amax(1, keepdim=True) * (0.5 / 127 + 2.0**-22) + 127 * 2.0**-149


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@given(values=ROWS)
def test_a_lossy_codec_is_off_by_half_a_step_at_most(codec, values):
    rows = torch.from_numpy(values)
    decoded = through(codec, rows)
    assert ((decoded - rows).abs() <= half_step(codec, rows)).all()
    assert torch.equal(torch.from_numpy(values), rows)  # what is encoded is left alone


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@given(values=ROWS, at=st.integers(0, 5))
def test_rows_in_slices_give_what_they_give_together(codec, values, at):
    rows = torch.from_numpy(values)
    parts = [through(codec, part) for part in (rows[:at], rows[at:]) if len(part)]
    assert torch.equal(torch.cat(parts), through(codec, rows))


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@given(rounds=st.lists(hnp.arrays(np.float32, (3, 4), elements=FINITE), min_size=1, max_size=8))
def test_with_error_feedback_nothing_is_lost_over_the_rounds(codec, rounds):
    carried, sent, exact = torch.zeros(3, 4), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    largest = torch.zeros(3, 4)
    for values in rounds:
        change = torch.from_numpy(values) + carried
        decoded = through(codec, change)
        carried = change - decoded
        sent += decoded
        exact += torch.from_numpy(values)
        largest = torch.maximum(largest, change.abs())
        # what was sent in all is behind what should have been by what is still carried; fp32 sums of changes
        slack = len(rounds) * largest * 2.0**-23
        assert ((exact - sent - carried).abs() <= slack).all()
        assert (carried.abs() <= half_step(codec, change) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@given(pair=hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 5), st.integers(1, 8)), elements=FINITE))
def test_what_is_done_in_one_pass_is_bit_for_bit_what_decoded_rows_give(codec, pair):
    before, change = torch.from_numpy(pair.copy())
    wire, scale = codec.encode(change)
    decoded = codec.decode(wire, scale)
    added, lost, after, kept = before.clone(), change.clone(), before.clone(), change.clone()
    codec.add(added, wire, scale)
    assert_same_bits(added, before + decoded)
    codec.subtract(lost, wire, scale)
    assert_same_bits(lost, change - decoded)
    codec.move(after, kept, wire, scale)
    assert_same_bits(after, added)
    assert_same_bits(kept, change + (before - added))


def assert_same_bits(one, other):
    assert one.numpy().tobytes() == other.numpy().tobytes()


@given(hnp.arrays(np.uint32, st.tuples(st.integers(1, 4), st.integers(1, 9))))
def test_bf16_rounds_as_torch_does_whatever_the_value(bits):
    rows = torch.from_numpy(bits.view(np.float32))
    ours, theirs = codec_named("bf16").encode(rows)[0], rows.to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_a_value_that_is_not_finite_shows_on_the_wire(codec, value):
    wire, scale = codec.encode(torch.tensor([[1.0, value, 2.0], [1.0, 2.0, 3.0]]))
    finite = (wire if scale is None else scale).isfinite()
    assert [bool(row.all()) for row in finite] == [False, True]


@given(ROWS)
def test_fp32_is_the_identity_bit_for_bit(values):
    assert through(codec_named("fp32"), torch.from_numpy(values)).numpy().tobytes() == values.tobytes()


def test_int8_by_hand():
    codec = codec_named("int8")
    wire, scale = codec.encode(torch.tensor([[127.0, -64.4, 0.6], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.01]]))
    assert wire.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 64, 0]]
    assert scale.tolist() == pytest.approx([1, 0, 0.02])
    assert codec.decode(wire, scale)[1].tolist() == [0, 0, 0]
    wire, scale = codec.encode(torch.tensor([1.0, -127.0]))  # one axis is one row
    assert (wire.tolist(), scale.tolist()) == ([1, -127], [1.0])


def test_a_row_too_small_for_a_scale_is_sent_as_zeros_and_carried():
    tiny = torch.full((1, 2), 2.0**-149)
    assert through(codec_named("int8"), tiny).tolist() == [[0, 0]]


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_any_floating_dtype_and_layout_goes_in(codec):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).T
    assert torch.allclose(through(codec, rows), rows.float(), rtol=0.01)
    assert codec.encode(rows)[0].is_contiguous()


def test_codecs_are_known_by_name_and_by_dtype():
    assert {name: codec.wire_dtype for name, codec in CODECS.items()} == {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "int8": torch.int8,
    }
    assert all(CODEC_OF_DTYPE[codec.wire_dtype] is codec for codec in CODECS.values())
    with pytest.raises(ValueError, match="unknown codec 'zip': known are fp32, bf16, int8"):
        codec_named("zip")
