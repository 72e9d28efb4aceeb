"""Quantities as people write them: 48GiB, 1Gbps."""

import math
import re

import click

_BYTES = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_BITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Bytes(click.ParamType[int]):
    """48GiB, 80GB, 512B: never without a unit, since 48 would be 48 bytes."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes; a usage error for anything else."""
        match = re.fullmatch(r"([\d.]+)\s*(?=[A-Z])([KMGT]I?|)B?", value.strip().upper())
        if not match or match[2] not in _BYTES or not _is_positive(match[1], _BYTES[match[2]]):
            self.fail(f"{value!r}: expected a size with its unit, such as 48GiB or 80GB", param, ctx)
        return round(float(match[1]) * _BYTES[match[2]])


class BitsPerSecond(click.ParamType[float]):
    """1Gbps, 100Mbit/s, 9600bps: never without a unit, since 1 would be one bit a second, and never in bytes."""

    name = "rate"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Bits a second; a usage error for anything else."""
        match = re.fullmatch(r"([\d.]+)\s*(?=[A-Z])([KMGT]?)(BPS|BIT/S|)", value.strip().upper())
        in_bytes = re.search(r"B(?!(?i:it))|byte", value)  # GBps, MB/s
        if not match or in_bytes or not _is_positive(match[1], _BITS[match[2]]):
            hint = "; B stands for bytes, of 8 bits each" if in_bytes else ""
            self.fail(f"{value!r}: expected bits a second with their unit, such as 1Gbps or 100Mbps{hint}", param, ctx)
        return float(match[1]) * _BITS[match[2]]


def _is_positive(text: str, unit: int) -> bool:
    try:
        return 0 < float(text) * unit < math.inf
    except ValueError:
        return False


def duration(seconds: float) -> str:
    """Seconds for a person."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def rate(bits_per_s: float) -> str:
    """Bits a second for a person."""
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g} {unit}"
    return f"{bits_per_s:g} bit/s"
