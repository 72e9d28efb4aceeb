"""Names and texts that would be lines of ours, if they were shown as they come: of nodes to the hub, and of a hub to a
node and to `spes-mega status`."""

import json
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner

from spes_mega.client.client import HubClient
from spes_mega.errors import SpesError
from spes_mega.hub.console import Console
from spes_mega.tools.status import command as status
from spes_mega.wire.errors import KIND_KEY, PayloadError
from spes_mega.wire.frames import frame_of
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import data_bytes, in_fp32, payload_header
from tests.hub.fabricated import make_recipe, shapes_of
from tests.wire.test_fuzz import push_messages

FORGED = "x' is fine.\nround 9/9  \x1b[2J\u202eall nodes\u2028  node 1  left\r"


def lines(text):
    """Those that a terminal, or whoever reads a log, would see."""
    shown = text.splitlines()
    assert all(line.isprintable() for line in shown), shown
    return shown


def show_status(address):
    result = CliRunner().invoke(status, ["--hub", address], catch_exceptions=False)
    assert result.exit_code == 0
    # The hub is a thread of this process: its own first line may come while the command's output is caught.
    return [line for line in lines(result.output) if not line.startswith("hub listening on")]


def headers(recipe):
    """Headers of pushes with a forged name, dtype or metadata, of the size that the push of node 0 has."""
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    yield {FORGED: entry | {"dtype": "F16"}}
    yield {"x": entry | {"dtype": FORGED}}
    yield {FORGED: entry | {"shape": [-1]}}
    yield {"x": entry, FORGED: entry}
    forms = in_fp32(shapes_of(recipe, 0))
    size = data_bytes(forms)
    mine = json.loads(payload_header(forms)[8:])
    yield mine | {FORGED: {"dtype": "F32", "shape": [0], "data_offsets": [size, size]}}
    yield {FORGED: {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size // 8 * 8]}}


def test_what_a_node_names_its_tensors_is_quoted_in_the_status_and_in_its_answer(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    client = connect(hub, 0)
    client.join()
    size = data_bytes(in_fp32(shapes_of(recipe, 0)))
    for count, header in enumerate(headers(recipe), 1):
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = len(text).to_bytes(8, "little") + text + bytes(size)
        with pytest.raises(PayloadError) as refused:
            client._channel.call("Push", push_messages(client, [frame_of(0, data)], len(data)), 20)
        assert str(refused.value).isprintable()
        assert r"fine.\n" in str(refused.value)
        shown = show_status(hub.address)
        assert len(shown) == 4 + count  # the run, for whom it waits, two nodes, and the refused pushes
        assert shown[-1].startswith("  refused: push of node 0 for round 0: push of node 0: ")


@pytest.mark.parametrize("field", ["digest", "session"])
def test_what_a_node_says_it_is_is_quoted(start_hub, connect, field):
    hub = start_hub(make_recipe())
    client = connect(hub, 0)
    setattr(client._caller, field, FORGED)
    with pytest.raises(SpesError) as refused:
        client.join()
    assert str(refused.value).isprintable()
    opening = pb.PushOpening(caller=client._caller, round=0, total_bytes=1, payload=FORGED)
    with pytest.raises(grpc.RpcError):
        client._channel._stub.Push(iter([opening.SerializeToString()]), timeout=20)
    assert len(show_status(hub.address)) == 5


def test_an_event_is_one_line_and_json_stays_json(capsys):
    Console().say("x", f"quotes {FORGED}")
    assert len(lines(capsys.readouterr().out)) == 1
    Console(as_json=True).say("x", "", reason=FORGED)
    assert json.loads(capsys.readouterr().out)["reason"] == FORGED


class HostileHub(grpc.GenericRpcHandler):
    """Answers each call with texts of its choice."""

    def __init__(self):
        self.kind = None
        self.reply = None
        self.server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[self])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self._answer)

    def _answer(self, messages, context):
        next(messages, None)
        if self.reply is not None:
            yield self.reply
            return
        if self.kind:
            context.set_trailing_metadata(((KIND_KEY, self.kind),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, FORGED)


@pytest.fixture
def hostile():
    hub = HostileHub()
    yield hub
    hub.server.stop(None)


@pytest.mark.parametrize("kind", [None, "refused", "store", "deadline", "stale"])
def test_what_a_hub_answers_is_one_line_for_the_node(hostile, kind):
    hostile.kind = kind
    with HubClient(hostile.address, 0, "") as client, pytest.raises(SpesError) as refused:
        client.join()
    assert str(refused.value).isprintable()
    assert r"fine.\nround 9/9" in str(refused.value)


def test_the_names_in_a_hub_s_state_are_quoted(hostile, tmp_path):
    header = json.dumps({FORGED: {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    opening = pb.PullOpening(total_bytes=len(data), payload="x").SerializeToString()

    def answer(messages, context):
        next(messages, None)
        yield opening
        yield frame_of(0, data)

    hostile._answer = answer
    with HubClient(hostile.address, 0, "", spool_dir=tmp_path) as client, pytest.raises(PayloadError) as refused:
        client.pull()
    assert str(refused.value).isprintable()


def test_what_a_hub_says_of_itself_makes_no_lines_of_the_status(hostile):
    hostile.reply = pb.StatusReply(
        name=FORGED,
        digest=FORGED,
        trouble=FORGED,
        nodes=[pb.NodeStatus(state=FORGED)],
        rejected=[pb.RejectionStatus(reason=FORGED * 1000)],
    ).SerializeToString()
    shown = show_status(hostile.address)
    assert len(shown) == 4
    assert max(map(len, shown)) < 2200


@pytest.mark.parametrize(("offset", "chunk"), [(0, 0), (2**63, 1000)])
def test_a_hub_that_wants_impossible_parts_of_a_push_is_left(hostile, offset, chunk):
    hostile.reply = pb.OfferReply(offset=offset, chunk_bytes=chunk).SerializeToString()
    with HubClient(hostile.address, 0, "") as client, pytest.raises(PayloadError, match="the hub wants byte"):
        client.push(0, {}, [])
