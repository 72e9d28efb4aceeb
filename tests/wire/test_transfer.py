"""Transfers over lines that are cut, slow, late or silent, and over a hub that is started anew."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spes_mega.client import channel as channel_module
from spes_mega.client.client import HubClient
from spes_mega.hub.pull import send as send_module
from spes_mega.hub.push import uploads as uploads_module
from spes_mega.wire.frames import CHUNK_BYTES, Arrival
from spes_mega.wire.proto import hub_pb2 as pb
from tests.hub.fabricated import assert_same, fabricate, make_recipe, pull, push, read_state
from tests.hub.relay import Relay

MODEL = {"vocab_size": 180_000}  # a payload of 23 MB: 11 chunks
CUT_BYTES = 16 << 20
SLACK_BYTES = 10 << 20
"""What is sent twice at most after a cut: the chunk under way, the hub's window, and 6 MiB in a socket's buffer. Less
than what was there before the cut, which a transfer begun anew would send twice."""
assert SLACK_BYTES < CUT_BYTES


@pytest.fixture
def line(start_hub):
    """A hub of one node, the line to it, and the node's client."""
    recipe = make_recipe(MODEL, num_nodes=1)
    hub = start_hub(recipe)
    relay = Relay(hub.address)
    with HubClient(relay.address, 0, recipe.digest(), rpc_deadline_s=60) as client:
        client.join()
        yield hub, relay, client


@pytest.fixture
def tensors(line):
    return fabricate(line[0].recipe, 0, 0)


def payload_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def pushed(hub, tensors):
    """The round is closed, and the state of its single node is what it pushed."""
    assert hub.run.state.rounds.wait_round(1, 30) == 1
    assert_same(read_state(hub.state / "rounds/000001"), tensors)


def test_a_push_that_is_cut_goes_on_where_it_stopped(line, tensors):
    hub, relay, client = line
    relay.cut_after("up", CUT_BYTES)
    push(client, 0, tensors)
    pushed(hub, tensors)
    size = payload_bytes(tensors)
    assert relay.passed["up"] < size + SLACK_BYTES
    assert size < client.bytes_up < size + SLACK_BYTES


def test_a_pull_that_is_cut_goes_on_where_it_stopped(line, tensors):
    hub, relay, client = line
    relay.cut_after("down", CUT_BYTES)
    state = pull(client)[1]
    assert_same(state, read_state(hub.state / "rounds/000000"))
    size = payload_bytes(tensors)
    assert relay.passed["down"] < size + SLACK_BYTES
    assert size < client.bytes_down < size + 100_000  # what was checked and kept is not asked for again


def test_a_push_that_is_cut_again_and_again_still_comes_to_its_end(line, tensors):
    hub, relay, client = line

    def cut_thrice():
        for count in (3 << 20, 6 << 20, 9 << 20):
            while relay.passed["up"] < count:
                time.sleep(0.001)
            relay.cut()

    relay.bytes_per_s = 16 << 20
    with ThreadPoolExecutor() as pool:
        cutting = pool.submit(cut_thrice)
        push(client, 0, tensors)
        cutting.result()
    pushed(hub, tensors)
    assert relay.passed["up"] < payload_bytes(tensors) + 3 * SLACK_BYTES


@pytest.mark.parametrize("chunk", [300_001, CHUNK_BYTES + 12_345])
def test_a_transfer_that_is_begun_again_may_have_other_chunk_sizes(line, tensors, monkeypatch, chunk):
    hub, relay, client = line
    take, changed = uploads_module.Upload.take, []

    def change_size(self, attempt, frame):
        if self.arrival.received > CUT_BYTES and not changed:
            changed.append(self.arrival.received)
            hub.run.state.chunk_bytes = chunk
            relay.cut()
        return take(self, attempt, frame)

    monkeypatch.setattr(uploads_module.Upload, "take", change_size)
    push(client, 0, tensors)
    assert changed
    pushed(hub, tensors)


def test_a_push_goes_on_with_a_hub_that_was_started_anew(line, tensors, start_hub):
    hub, relay, client = line
    relay.bytes_per_s = 8 << 20
    with ThreadPoolExecutor() as pool:
        pushing = pool.submit(push, client, 0, tensors)
        while relay.passed["up"] < CUT_BYTES // 2:
            time.sleep(0.01)
        hub.stop()
        again = start_hub(hub.recipe)
        assert not list((hub.state / "pushes").rglob("*.part"))
        relay.target, relay.bytes_per_s = again.address, None
        relay.cut()  # what has come to the old hub, whose sockets live on in this process
        pushing.result(timeout=60)
    pushed(again, tensors)


def test_a_pull_goes_on_with_a_hub_that_was_started_anew(line, tensors, start_hub):
    hub, relay, client = line
    relay.bytes_per_s = 8 << 20
    with ThreadPoolExecutor() as pool:
        pulling = pool.submit(pull, client)
        while relay.passed["down"] < CUT_BYTES:
            time.sleep(0.01)
        hub.stop()
        again = start_hub(hub.recipe)
        relay.target, relay.bytes_per_s = again.address, None
        relay.cut()  # what has come to the old hub, whose sockets live on in this process
        state = pulling.result(timeout=60)[1]
    assert_same(state, read_state(hub.state / "rounds/000000"))
    assert client.bytes_down < payload_bytes(tensors) + 100_000  # its state is the same, and so it went on


def test_a_pull_begins_anew_if_the_hub_has_another_state_meanwhile(line, tensors, monkeypatch):
    hub, relay, client = line
    frames, closed = send_module.frames, []

    def close_in_between(pieces, chunk, begin):
        for count, frame in enumerate(frames(pieces, chunk, begin)):
            yield frame
            if count == 2 and not closed:
                closed.append(begin)
                with HubClient(hub.address, 0, hub.recipe.digest()) as other:
                    other._caller.session = client._caller.session
                    push(other, 0, tensors)
                    other.wait_round(1)
                relay.cut()

    monkeypatch.setattr(send_module, "frames", close_in_between)
    round_, state = pull(client)
    assert closed == [0]
    assert round_ == 1
    assert_same(state, tensors)


def test_a_line_that_is_silent_for_long_is_given_up_and_taken_up_again(start_hub, monkeypatch):
    """A minute of silence with pings every half minute, both a thirtieth."""
    options = dict(channel_module.CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 700}
    monkeypatch.setattr(channel_module, "CHANNEL_OPTIONS", tuple(options.items()))
    recipe = make_recipe(MODEL, num_nodes=1)
    hub = start_hub(recipe)
    tensors = fabricate(recipe, 0, 0)
    relay = Relay(hub.address)
    client = HubClient(relay.address, 0, recipe.digest(), rpc_deadline_s=60)
    with client, ThreadPoolExecutor() as pool:
        client.join()
        relay.bytes_per_s = 8 << 20
        pushing = pool.submit(push, client, 0, tensors)
        while relay.passed["up"] < CUT_BYTES // 2:
            time.sleep(0.01)
        relay.silence()
        time.sleep(2.5)
        relay.speak()
        relay.bytes_per_s = None
        pushing.result(timeout=60)
        pushed(hub, tensors)
        assert client.bytes_up < payload_bytes(tensors) + CUT_BYTES


def test_a_late_and_slow_line_carries_both_ways(line, tensors):
    hub, relay, client = line
    relay.delay_s = 0.005
    state = pull(client)[1]
    assert_same(state, read_state(hub.state / "rounds/000000"))
    push(client, 0, tensors)
    pushed(hub, tensors)


def opening(payload, offset=0):
    return pb.PushOpening(payload=payload, total_bytes=100, offset=offset)


def test_an_attempt_that_is_overtaken_writes_nothing_more(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        taken = []
        patch.setattr(Arrival, "take", lambda self, frame: taken.append(frame) or len(frame))
        uploads, ended = uploads_module.Uploads(tmp_path), []
        with uploads.attempt(0, opening("id"), 50, lambda: ended.append(1)) as first:
            first.take(b"1")
            with uploads.attempt(0, opening("id"), 50, lambda: ended.append(2)) as second:
                assert ended == [1]
                with pytest.raises(uploads_module.BrokenTransferError, match="a newer attempt"):
                    first.take(b"2")
                second.take(b"3")
        assert taken == [b"1", b"3"]


def test_uploads_of_one_node_are_few_and_files_go_with_their_round(tmp_path):
    uploads = uploads_module.Uploads(tmp_path)
    with uploads.attempt(0, opening("a"), 50, list), uploads.attempt(0, opening("b"), 50, list):
        with (
            pytest.raises(uploads_module.BusyError, match="node 0 has 2 uploads"),
            uploads.attempt(0, opening("c"), 50, list),
        ):
            pass
        with uploads.attempt(1, opening("c"), 50, list):
            assert len(list(tmp_path.iterdir())) == 3
    for number in range(20):  # strays take the place of what is idle
        with uploads.attempt(0, opening(f"{number}"), 50, list):
            pass
    assert len(list(tmp_path.iterdir())) == 3
    with (
        pytest.raises(uploads_module.BrokenTransferError, match="only 0 bytes are here"),
        uploads.attempt(0, opening("0", offset=50), 50, list),
    ):
        pass
    uploads.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_client_is_used_again_when_its_state_was_closed(line, tensors):
    hub, _, client = line
    initial = read_state(hub.state / "rounds/000000")
    first, second = client.pull(), client.pull()  # two at a time have a file each
    assert_same(dict(first), initial)
    assert_same(dict(second), initial)
    first.close()
    first.close()
    push(client, 0, tensors)
    with pytest.raises(ValueError, match="this state was closed"):
        first.read("model.norm.weight")
    pushed(hub, tensors)
    assert_same(pull(client)[1], tensors)
    assert_same(dict(second), initial)
    second.close()


def test_a_push_is_written_over_that_of_the_round_before(line, tensors, monkeypatch):
    hub, _, client = line

    def staged():
        return {path.name: path.stat().st_ino for path in (hub.state / "pushes").rglob("*.*")}

    push(client, 0, tensors)
    pushed(hub, tensors)
    ((spare, inode),) = staged().items()
    assert spare.endswith(".spare"), "nothing has the name of a push before its own bytes are there"
    seen = set()
    take = uploads_module.Upload.take

    def watched(upload, attempt, frame):
        seen.update(name.partition(".")[2].partition(".")[2] for name in staged())
        return take(upload, attempt, frame)

    monkeypatch.setattr(uploads_module.Upload, "take", watched)
    others = fabricate(hub.recipe, 0, 1)
    push(client, 1, others)
    assert seen == {"part"}
    assert hub.run.state.rounds.wait_round(2, 30) == 2
    assert_same(read_state(hub.state / "rounds/000002"), others)
    assert list(staged().values()) == [inode]
