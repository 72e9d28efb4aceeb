"""The hub as its own process: the command, crashes, signals, memory, and what it leaves."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import CliRunner

from spes_mega.node.launch.command import free_port
from spes_mega.tools.status import command as status_command
from tests.hub.fabricated import (
    assert_same,
    fabricate,
    make_recipe,
    next_state,
    pull,
    push,
    raw_recipe,
    read_state,
    until_durable,
)
from tests.hub.process import TOKEN


def train(client, recipe):
    round_ = client.join().round
    while round_ < recipe.num_rounds:
        client.pull().close()
        push(client, round_, fabricate(recipe, client.node, round_))
        round_ = client.wait_round(round_ + 1)


def test_a_killed_hub_goes_on_with_what_was_committed(start_process, tmp_path):
    raw = raw_recipe(train={"steps": 20, "seq_len": 16})
    port = free_port()
    hub = start_process(raw, port=port)
    recipe = hub.recipe
    zero, one = hub.client(0), hub.client(1)
    zero.join()
    one.join()
    for node, client in enumerate((zero, one)):
        push(client, 0, fabricate(recipe, node, 0))
    assert zero.wait_round(1) == 1
    before = pull(zero)[1]
    push(zero, 1, fabricate(recipe, 0, 1))
    until_durable(tmp_path / "state/rounds/000001")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(zero.wait_round, 2)  # the client outlives the crash of the hub
        hub.kill()
        (tmp_path / "state/rounds/.000002.partial-00").mkdir()  # as if it had been writing the next state
        again = start_process(raw, port=port)
        assert one.status()["waiting_for"] == [1]
        assert_same(pull(one)[1], before)
        push(one, 1, fabricate(recipe, 1, 1))
        assert waiting.result(timeout=20) == 2
    expected = next_state(recipe, before, {node: fabricate(recipe, node, 1) for node in (0, 1)})
    assert_same(pull(zero, 1)[1], {name: t for name, t in expected.items() if not owned_by_node_0(name)})
    zero.leave()
    one.leave()
    assert again.end() == 0
    assert "going on from round 1/2" in again.output
    assert "run finished at round 2" in again.output
    assert sorted(path.name for path in (tmp_path / "state/rounds").glob("[!.]*")) == ["000001", "000002"]
    assert_same(read_state(tmp_path / "state/snapshots/round-000002"), expected)
    zero.close()
    one.close()


def owned_by_node_0(name):
    return ".experts.0." in name or ".experts.1." in name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly(start_process, tmp_path, number):
    hub = start_process(raw_recipe())
    client = hub.client(0)
    client.join()
    push(client, 0, fabricate(hub.recipe, 0, 0))
    hub.process.send_signal(number)
    assert hub.end() == 0
    assert hub.output.endswith("hub stopped at round 0\n")
    files = sorted(path.name for path in (tmp_path / "state").rglob("*") if path.is_file())
    push_file = next((tmp_path / "state/pushes/000000").iterdir())
    assert re.fullmatch(r"node-000-[0-9a-f]{16}\.safetensors", push_file.name)
    assert files == [
        "checksums.json",
        "config.json",
        "lock",
        "members.json",
        "model.safetensors",
        push_file.name,
        "round.json",
        "run.json",
    ]
    client.close()


def test_one_that_was_stopped_past_the_deadline_takes_a_push_that_waited(start_process, connect):
    hub = start_process(raw_recipe(round_deadline_s=6, rpc_deadline_s=6, min_nodes=1))
    patient = make_recipe(min_nodes=1)  # deadlines are each side's own
    zero, one = (connect(hub, node, recipe=patient, token=TOKEN) for node in (0, 1))
    for client in (zero, one):
        client.join()
    before = pull(zero)[1]
    pushes = {node: fabricate(hub.recipe, node, 0) for node in (0, 1)}
    push(zero, 0, pushes[0])
    with ThreadPoolExecutor() as pool:
        hub.process.send_signal(signal.SIGSTOP)
        try:
            pushing = pool.submit(push, one, 0, pushes[1])
            time.sleep(8)
        finally:
            hub.process.send_signal(signal.SIGCONT)
        pushing.result(timeout=60)  # without it, the push of node 0 would suffice
    assert zero.wait_round(1) == 1
    assert_same(pull(zero)[1], next_state(hub.recipe, before, pushes))


def test_status_and_deadlines_from_the_command_line(start_process, monkeypatch):
    monkeypatch.setenv("SPES_MEGA_TOKEN", TOKEN)
    hub = start_process(raw_recipe(), "--set", "spes.round_deadline_s=3", "--set", "spes.rpc_deadline_s=3")
    clients = [hub.client(node) for node in (0, 1)]
    for client in clients:
        client.join()
    push(clients[1], 0, fabricate(hub.recipe, 1, 0))
    runner = CliRunner()
    text = runner.invoke(status_command, ["--hub", hub.address]).output
    assert "fabricated: round 0/4  step 0/40  merges 0" in text
    assert "waiting for the push of: 0" in text
    assert "node 1  joined  experts 2-3  last pushed round 0" in text
    status = json.loads(runner.invoke(status_command, ["--hub", hub.address, "--json"]).output)
    assert [node["state"] for node in status["nodes"]] == ["joined", "joined"]
    assert [node["last_pushed_round"] for node in status["nodes"]] == [None, 0]
    assert hub.end() == 7
    assert "error: round 0: node 0 did not push within 3 s" in hub.output
    for client in clients:
        client.close()


def test_the_last_snapshot_opens_in_transformers(start_process, tmp_path):
    transformers = pytest.importorskip("transformers")
    raw = raw_recipe(train={"steps": 10, "seq_len": 16}, num_nodes=1)
    hub = start_process(raw)
    client = hub.client(0)
    train(client, hub.recipe)
    client.leave()
    client.close()
    assert hub.end() == 0
    assert "round 1/1  step 10  nodes 0  " in hub.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "state/snapshots/round-000001")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    expected = fabricate(hub.recipe, 0, 0)
    assert torch.equal(model.model.norm.weight, expected["model.norm.weight"])
    assert torch.equal(model.lm_head.weight, expected["lm_head.weight"])
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_memory_does_not_grow_with_the_nodes(start_process, tmp_path):
    peaks = {}
    # a payload of 33 MB a node: 8 of them held in memory would show
    model = {"vocab_size": 256_000, "hidden_size": 32, "num_experts": 8, "tie_embeddings": True}
    for nodes in (2, 8):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        hub = start_process(raw_recipe(model, {"steps": 10, "seq_len": 16}, num_nodes=nodes), folder=folder)
        clients = [hub.client(node) for node in range(nodes)]
        with ThreadPoolExecutor(nodes) as pool:
            list(pool.map(train, clients, [hub.recipe] * nodes))
        peaks[nodes] = hub.peak_rss()
        for client in clients:
            client.leave()
            client.close()
        assert hub.end() == 0
    # a few chunks for each of 6 more transfers under way at once, against 200 MB of payloads more
    assert peaks[8] - peaks[2] < 70e6, peaks
