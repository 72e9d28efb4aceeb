"""Arithmetic of means and lossy codecs in one pass over rows: numpy or torch would take a pass for every operation.

All arrays are contiguous; rows of the codecs are two-dimensional [R, C], those of means have one axis. Every operation
is rounded on its own, so that whoever decodes gets the same bits. The GIL is let go.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., None])
_LEVELS, _HIGHEST = np.float32(127), np.int32(127)
_BLOCK = 2048
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_BITS = np.uint32(0x7F800000)


def _compiled(kernel: Kernel) -> Kernel:
    # Not kept on the disk: it takes some tenths of a second, and a file that was damaged would stop everybody.
    return cast(Kernel, numba.njit(kernel, nogil=True, error_model="numpy"))


@_compiled
def add_weighted(total, values, weight):  # type: ignore[no-untyped-def]
    """total fp64 + weight * values fp32, in place."""
    for i in range(total.size):
        total[i] += np.float64(values[i]) * weight


@_compiled
def divide(total, divisor, out):  # type: ignore[no-untyped-def]
    """`out` fp32 from total fp64 / divisor."""
    for i in range(total.size):
        out[i] = np.float32(total[i] / divisor)


@_compiled
def merge(rows, donors, begins, alpha, kept, out):  # type: ignore[no-untyped-def]
    """kept * own + alpha * mean(donor - own), in fp64; `rows` and `out` are fp32 [E, N].

    The donors of an expert e are those in `donors` from begins[e] to begins[e + 1]; without any it takes nothing.
    """
    pull = np.empty(_BLOCK)
    for own in range(rows.shape[0]):
        first, last = begins[own], begins[own + 1]
        weight = alpha / (last - first) if last > first else 0.0
        for start in range(0, rows.shape[1], _BLOCK):
            length = min(_BLOCK, rows.shape[1] - start)
            values = rows[own, start : start + length]
            pull[:length] = -0.0
            for k in range(first, last):
                donor = rows[donors[k], start : start + length]
                for i in range(length):
                    pull[i] += np.float64(donor[i]) - np.float64(values[i])
            for i in range(length):
                out[own, start + i] = np.float32(pull[i] * weight + np.float64(values[i]) * kept)


@_compiled
def int8_scales(bits, scale, scale_bits):  # type: ignore[no-untyped-def]
    """A 127th of each row's largest magnitude; `bits` int32 [R, C] are those of the fp32 values, `scale` fp32 [R].

    `scale_bits` is the memory of `scale` as int32. Magnitudes compare as integers, of which a NaN is the largest, so
    that it shows in the scale.
    """
    for row in range(bits.shape[0]):
        largest = np.int32(0)
        for column in range(bits.shape[1]):
            magnitude = bits[row, column] & _MAGNITUDE
            largest = magnitude if magnitude > largest else largest
        scale_bits[row] = largest
    for row in range(bits.shape[0]):
        scale[row] /= _LEVELS


@_compiled
def int8_encode(values, scale, wire):  # type: ignore[no-untyped-def]
    """`wire` int8 [R, C] from fp32 values and their scales."""
    for row in range(values.shape[0]):
        # A scale of 0 (a row of zeros, or of values too small to have one) must not divide: all of it is carried on.
        step = scale[row] if scale[row] > 0 else np.float32(np.inf)
        for column in range(values.shape[1]):
            level = np.int32(np.rint(values[row, column] / step))
            # A scale below fp32's normal range is itself rounded, so that a quotient may be over the highest level.
            level = _HIGHEST if level > _HIGHEST else level
            wire[row, column] = -_HIGHEST if level < -_HIGHEST else level


@_compiled
def int8_decode(wire, scale, out):  # type: ignore[no-untyped-def]
    """`out` fp32 [R, C] from the wire."""
    for row in range(wire.shape[0]):
        for column in range(wire.shape[1]):
            out[row, column] = np.float32(wire[row, column]) * scale[row]


@_compiled
def int8_add(onto, wire, scale, sign):  # type: ignore[no-untyped-def]
    """onto + sign * decoded, in place; `sign` is fp32 1 or -1."""
    for row in range(onto.shape[0]):
        step = scale[row] * sign
        for column in range(onto.shape[1]):
            onto[row, column] += np.float32(wire[row, column]) * step


@_compiled
def int8_move(before, change, wire, scale):  # type: ignore[no-untyped-def]
    """See `Codec.move`."""
    for row in range(before.shape[0]):
        step = scale[row]
        for column in range(before.shape[1]):
            after = before[row, column] + np.float32(wire[row, column]) * step
            change[row, column] += before[row, column] - after
            before[row, column] = after


@_compiled
def bf16_encode(bits, wire):  # type: ignore[no-untyped-def]
    """`wire` uint16 [R, C], the nearest bf16 (ties to even) of fp32 values with these `bits`, uint32 [R, C]."""
    for row in range(bits.shape[0]):
        for column in range(bits.shape[1]):
            value = bits[row, column]
            rounded = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (value & np.uint32(_MAGNITUDE)) > _INFINITY_BITS
            wire[row, column] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@_compiled
def _bf16_widen(wire, bits):  # type: ignore[no-untyped-def]
    """Bits of fp32 values, uint32 [C], of which `wire` uint16 [C] is the upper half."""
    for column in range(wire.size):
        bits[column] = np.uint32(wire[column]) << np.uint32(16)


@_compiled
def bf16_add(onto, wire, sign):  # type: ignore[no-untyped-def]
    """onto + sign * decoded, in place; `wire` is uint16."""
    bits = np.empty(onto.shape[1], np.uint32)
    decoded = bits.view(np.float32)
    for row in range(onto.shape[0]):
        _bf16_widen(wire[row], bits)
        for column in range(onto.shape[1]):
            onto[row, column] += decoded[column] * sign


@_compiled
def bf16_move(before, change, wire):  # type: ignore[no-untyped-def]
    """See `Codec.move`."""
    bits = np.empty(before.shape[1], np.uint32)
    decoded = bits.view(np.float32)
    for row in range(before.shape[0]):
        _bf16_widen(wire[row], bits)
        for column in range(before.shape[1]):
            after = before[row, column] + decoded[column]
            change[row, column] += before[row, column] - after
            before[row, column] = after
