import os
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_mega.wire.errors import DamagedError, PayloadError
from spes_mega.wire.frames import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    PREFIX_BYTES,
    Arrival,
    Piece,
    chunk_bytes,
    file_pieces,
    frame_of,
    frames,
)


def collect(stream, total, before=b""):
    with tempfile.TemporaryFile() as file:
        file.write(before)
        file.flush()
        arrival = Arrival(file.fileno(), total, len(before))
        for frame in stream:
            arrival.take(frame)
        arrival.finish()
        return os.pread(file.fileno(), total + 1, 0)


@given(st.lists(st.binary(max_size=40), max_size=10), st.integers(1, 30), st.data())
def test_pieces_of_any_size_arrive_as_one_stream_from_any_byte_on(contents, chunk, data):
    whole = b"".join(contents)
    begin = data.draw(st.integers(0, len(whole)))
    stream = list(frames([Piece(len(c), lambda c=c: c) for c in contents], chunk, begin))
    assert all(len(frame) == PREFIX_BYTES + chunk for frame in stream[:-1])
    assert collect(stream, len(whole), whole[:begin]) == whole


def test_what_came_before_the_break_is_not_read_again():
    read = []
    pieces = [Piece(4, lambda i=i: read.append(i) or bytes([i] * 4)) for i in range(5)]
    assert collect(frames(pieces, 100, 9), 20, b"x" * 9) == b"x" * 9 + b"\2\2\2" + b"\3" * 4 + b"\4" * 4
    assert read == [2, 3, 4]


def test_a_file_longer_than_a_chunk_arrives_whole():
    whole = os.urandom(2 * CHUNK_BYTES) + b"x"
    with tempfile.TemporaryFile() as file:
        file.write(whole)
        file.flush()
        stream = list(frames(file_pieces(file.fileno(), len(whole)), CHUNK_BYTES))
    assert [len(frame) - PREFIX_BYTES for frame in stream] == [CHUNK_BYTES, CHUNK_BYTES, 1]
    assert collect(stream, len(whole)) == whole


def flipped(frame, at):
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([frame_of(0, b"ab"), frame_of(3, b"cd")], "a chunk for byte 3 came where byte 2 was due"),
        ([frame_of(0, b"ab"), frame_of(0, b"ab")], "a chunk for byte 0 came where byte 2 was due"),
        ([frame_of(0, b"abcde")], "more bytes came than the 4"),
        ([frame_of(0, b"")], "a chunk of 0 bytes"),
        ([b"short"], "a chunk of 0 bytes"),
        ([frame_of(0, bytes(MAX_CHUNK_BYTES + 1))], f"a chunk of {MAX_CHUNK_BYTES + 1} bytes"),
        ([frame_of(0, b"abc")], "the stream ended after 3 of 4 bytes"),
    ],
)
def test_streams_that_are_not_the_payload_are_refused(stream, message):
    with pytest.raises(PayloadError, match=message):
        collect(stream, 4)


@pytest.mark.parametrize("at", [8, PREFIX_BYTES, PREFIX_BYTES + 1])
def test_a_bit_that_flipped_is_found_and_what_came_before_stands(at):
    with tempfile.TemporaryFile() as file:
        arrival = Arrival(file.fileno(), 4)
        arrival.take(frame_of(0, b"ab"))
        with pytest.raises(DamagedError, match="bad checksum of the chunk at byte 2"):
            arrival.take(flipped(frame_of(2, b"cd"), at))
        assert arrival.received == 2
        arrival.take(frame_of(2, b"cd"))
        assert os.pread(file.fileno(), 5, 0) == b"abcd"


@given(st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_payload_error(frame):
    with tempfile.TemporaryFile() as file, pytest.raises(PayloadError):
        Arrival(file.fileno(), 1 << 20).take(frame)


@given(st.integers(1, 1000))
def test_all_chunks_together_hardly_depend_on_the_number_of_nodes(nodes):
    assert MIN_CHUNK_BYTES <= chunk_bytes(nodes) <= CHUNK_BYTES
    assert chunk_bytes(nodes) == MIN_CHUNK_BYTES or nodes * chunk_bytes(nodes) <= 4 * CHUNK_BYTES
