"""Bytes that no honest peer sends, from a fixed budget of random ones: clean errors, and a hub that lives on."""

import contextlib
import json
import random
import tempfile
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spes_mega.hub.push.check import tokens_of
from spes_mega.hub.push.uploads import MAX_UPLOADS
from spes_mega.outer.codecs import codec_named
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.frames import Arrival, frame_of
from spes_mega.wire.payload import StoredPayload, write_payload
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import forms_of, header_limit, in_fp32
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, pushes_in, shapes_of
from tests.hub.rpc.test_hub import push_messages, until

BUDGET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
SHAPES = {"a": (3, 4), "b": (5,)}
FORMS = {
    "fp32": in_fp32(SHAPES),
    "mixed": forms_of(SHAPES, {"a": codec_named("int8"), "b": codec_named("bf16")}.__getitem__),
}
CLEAN = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


def payload_bytes(forms):
    with tempfile.TemporaryFile() as file:
        write_payload(file, forms, ((n, torch.ones(s)) for n, s in SHAPES.items()), {"tokens": "7"})
        file.seek(0)
        return file.read()


@st.composite
def damaged(draw, whole):
    """The bytes with some of them changed, removed, or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "end")))
        if kind == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=40))
        else:
            del data[at:]
    return bytes(data)


def check(content, forms):
    """What the hub does with a payload that has come."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        payload = StoredPayload(file, "x", header_limit(forms))
        payload.check(forms)
        tokens_of(payload)
        payload.check_finite()
        for name in forms:
            assert payload.read(name).isfinite().all()


@pytest.mark.parametrize("name", FORMS)
def test_damaged_payloads(name):
    forms = FORMS[name]
    whole = payload_bytes(forms)
    check(whole, forms)

    @BUDGET
    @given(damaged(whole))
    def damage(content):
        with contextlib.suppress(PayloadError):  # some changes make another valid payload
            check(content, forms)

    damage()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "I8", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["a", "b", "a.scale", "dtype", "shape", "data_offsets", "__metadata__", "\ud800"]), inner
        )
    ),
    max_leaves=20,
)


@BUDGET
@given(JSON, st.integers(0, 200))
def test_headers_of_any_json(header, size):
    text = json.dumps(header).encode()
    with pytest.raises(PayloadError):
        check(len(text).to_bytes(8, "little") + text + bytes(size), FORMS["mixed"])


def test_headers_that_would_cost_much_to_parse():
    for text in (b"[" * 4000, b'{"a":' * 700, b"9" * 4500, b'{"a":{"dtype":"F32","shape":[' + b"9" * 4000 + b"]}}"):
        content = len(text).to_bytes(8, "little") + text
        with pytest.raises(PayloadError):
            check(content, FORMS["fp32"])
    with pytest.raises(PayloadError, match="a header of 1099511627776 bytes"):
        check((1 << 40).to_bytes(8, "little"), FORMS["fp32"])


@BUDGET
@given(st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=30), st.booleans()), max_size=8), st.integers(0, 100))
def test_frames_in_any_order(frames, total):
    with tempfile.TemporaryFile() as file:
        arrival = Arrival(file.fileno(), total)
        expected = b""
        for offset, data, right in frames:
            frame = bytearray(frame_of(offset, data))
            frame[8] ^= not right
            if right and data and offset == len(expected) and offset + len(data) <= total:
                assert arrival.take(bytes(frame)) == len(data)
                expected += data
            else:
                with pytest.raises(PayloadError):
                    arrival.take(bytes(frame))
        assert file.read() == expected


@BUDGET
@given(st.binary(max_size=40))
def test_bytes_that_are_no_frame(content):
    with tempfile.TemporaryFile() as file, pytest.raises(PayloadError):
        Arrival(file.fileno(), 1000).take(content)


class Raw:
    """Calls of a live hub with any bytes as messages."""

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address)

    def call(self, method, *messages):
        path = f"/spes_mega.hub.v1.{'Transfer' if method in ('Push', 'Pull') else 'Hub'}/{method}"
        if method == "Push":
            return self._channel.stream_unary(path)(iter(messages), timeout=30)
        if method == "Pull":
            return list(self._channel.unary_stream(path)(messages[0], timeout=30))
        return self._channel.unary_unary(path)(messages[0], timeout=30)

    def error(self, method, *messages):
        """How a call fails; None if it does not."""
        try:
            self.call(method, *messages)
        except grpc.RpcError as e:
            return e
        return None

    def close(self):
        self._channel.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def whole_push(client, recipe):
    """The messages of a valid push of node 0, in bytes."""
    with tempfile.TemporaryFile() as file:
        size = write_payload(file, in_fp32(shapes_of(recipe, 0)), fabricate(recipe, 0, 0).items(), {"tokens": "1"})
        file.seek(0)
        data = file.read()
    return list(push_messages(client, [frame_of(at, data[at : at + 5000]) for at in range(0, size, 5000)], size))


def test_a_live_hub_outlives_damaged_messages(start_hub, connect, tmp_path):
    recipe = make_recipe()
    hub = start_hub(recipe)
    clients = [connect(hub, node) for node in (0, 1)]
    for client in clients:
        client.join()
    initial = pull(clients[0])[1]
    caller = clients[0]._caller
    valid = {
        "Push": whole_push(clients[0], recipe),
        "Pull": [pb.PullRequest(caller=caller, have_round=0).SerializeToString()],
        "WaitRound": [pb.WaitRequest(caller=caller, round=0, timeout_s=0.01).SerializeToString()],
        "Offer": [pb.OfferRequest(caller=caller, round=0, payload="x", total_bytes=5).SerializeToString()],
        "Status": [pb.StatusRequest().SerializeToString()],
    }
    raw = Raw(hub.address)
    before = resident_bytes()
    taken = False
    others = {method: st.binary(max_size=200) for method in ("Join", "Leave")}  # a valid one would change who is there

    @BUDGET
    @given(st.data())
    def damage(data):
        method = data.draw(st.sampled_from([*valid, "Push", "Push", *others]))
        if method in others:
            messages = [data.draw(others[method])]
        else:
            messages = list(valid[method])
            at = data.draw(st.integers(0, len(messages) - 1))
            messages[at] = data.draw(damaged(messages[at]))
            if method == "Push" and messages[at] == valid[method][at]:
                return
        error = raw.error(method, *messages)
        # A push is taken if its damage means nothing (a field that nobody knows), and from then on its payload is over.
        nonlocal taken
        taken = taken or (method == "Push" and error is None)
        over = error is not None and method == "Push" and taken and "was given up" in error.details()
        assert error is None or over or error.code() in CLEAN, (method, error.code(), error.details())

    damage()
    raw.close()
    assert hub.error is None
    assert len(list((tmp_path / "state/pushes/000000").glob("*.part"))) <= MAX_UPLOADS  # that may yet be resumed
    assert json.dumps(clients[0].status()).isascii()
    assert resident_bytes() - before < 200e6
    for client in clients:  # the round goes on, with what honest nodes send
        client._caller.session = random.randbytes(8).hex()
        client.join()
    pushes = {node: fabricate(recipe, node, 0) for node in (0, 1)}
    for node, client in enumerate(clients):
        push(client, 0, pushes[node])
    assert clients[0].wait_round(1) == 1
    assert_same(pull(clients[0])[1], next_state(recipe, initial, pushes))
    until(lambda: not pushes_in(tmp_path / "state"))


@pytest.mark.parametrize(
    ("method", "message"),
    [("Status", b"\xff\xff"), ("Pull", b"\xff\xff"), ("Push", b"\xff\xff"), ("Status", bytes((4 << 20) + 1))],
    ids=["unary", "download", "upload", "too-long"],
)
def test_what_cannot_be_parsed_takes_no_stream_from_the_connection(start_hub, method, message):
    raw = Raw(start_hub(make_recipe()).address)
    errors = [raw.error(method, message) for _ in range(70)]
    assert {error.code() for error in errors} <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
    assert raw.error("Status", b"") is None  # more than a connection may have at a time have come and gone
    raw.close()


def test_a_name_that_cannot_be_encoded_is_refused_and_listed(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    client = connect(hub, 0)
    client.join()
    size = 4 * sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values()) + 1000
    header = json.dumps({"\ud800\x1b[2J": {"dtype": "F32", "shape": [3], "data_offsets": [0, 13]}}).encode()
    data = (len(header).to_bytes(8, "little") + header).ljust(size, b"\0")
    messages = push_messages(client, [frame_of(0, data)], size)
    with pytest.raises(PayloadError, match=r"'\\ud800\\x1b\[2J': 13 bytes for F32"):
        client._channel.call("Push", messages, 20)
    assert r"\ud800\x1b[2J" in client.status()["rejected"][0]["reason"]
