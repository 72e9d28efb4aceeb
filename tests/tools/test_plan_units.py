import click
import pytest

from spes_mega.tools.plan.units import BitsPerSecond, Bytes, duration


@pytest.mark.parametrize(("text", "expected"), [("48GiB", 48 << 30), ("80GB", 80 * 10**9), ("1.5k", 1500), ("7 B", 7)])
def test_sizes(text, expected):
    assert Bytes().convert(text, None, None) == expected


@pytest.mark.parametrize(("text", "expected"), [("1Gbps", 1e9), ("100Mbit/s", 1e8), ("9600bps", 9600), ("2g", 2e9)])
def test_rates(text, expected):
    assert BitsPerSecond().convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["much", "-1GB", "0GB", "1.2.3GB", "48GiB/s", "48", "1.5", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(click.BadParameter, match="expected a size with its unit, such as 48GiB"):
        Bytes().convert(text, None, None)
    with pytest.raises(click.BadParameter, match="expected bits a second with their unit, such as 1Gbps"):
        BitsPerSecond().convert(text, None, None)


@pytest.mark.parametrize("text", ["1GBps", "1 GB/s", "1MiB/s", "9kBps", "1GBPS"])
def test_bytes_a_second_are_refused_and_bits_in_capitals_are_not(text):
    with pytest.raises(click.BadParameter, match=r"expected bits a second .*; B stands for bytes, of 8 bits each"):
        BitsPerSecond().convert(text, None, None)
    assert BitsPerSecond().convert("1MBit/s", None, None) == BitsPerSecond().convert("1MBIT/S", None, None) == 1e6


@pytest.mark.parametrize("text", [f"{'9' * 300}GiB", f"{'9' * 400}GiB"])
def test_a_size_beyond_all_numbers_is_refused(text):
    with pytest.raises(click.BadParameter, match="expected a size with its unit"):
        Bytes().convert(text, None, None)


def test_durations_are_in_the_unit_of_their_size():
    assert [duration(s) for s in (0.5, 90, 600, 36_000, 864_000)] == ["0.5 s", "90 s", "10 min", "10 h", "10.0 days"]
