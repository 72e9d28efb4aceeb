"""What the outer loop must be in its special cases: plain training, and DiLoCo."""

import pytest
import torch

from tests.hub.fabricated import assert_same, fabricate, make_recipe, pull, push, read_state


def adamw(state):
    """Local training of all of a state on made-up gradients: optimizer state is kept, and never travels."""
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in state.items()}
    return parameters, torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1)


def local_step(recipe, node, step, parameters, optimizer):
    for name, gradient in fabricate(recipe, node, step).items():
        parameters[name].grad = gradient
    optimizer.step()


def take(parameters, values):
    for name, tensor in values.items():
        parameters[name].data.copy_(tensor)


@pytest.mark.parametrize("assignment", ["equal", "all"])
def test_one_node_that_synchronizes_every_step_is_plain_training_bit_for_bit(start_hub, connect, assignment):
    recipe = make_recipe(train={"steps": 5}, num_nodes=1, sync_every=1, ownership=assignment)
    hub = start_hub(recipe)
    plain, plain_optimizer = adamw(read_state(hub.state / "rounds/000000"))
    client = connect(hub, 0)
    client.join()
    mine, optimizer = adamw(pull(client)[1])
    for step in range(5):
        local_step(recipe, 0, step, plain, plain_optimizer)
        local_step(recipe, 0, step, mine, optimizer)
        push(client, step, {name: parameter.data for name, parameter in mine.items()})
        client.wait_round(step + 1)
        take(mine, pull(client, step)[1])
        assert_same({name: p.data for name, p in mine.items()}, {name: p.data for name, p in plain.items()})
    client.leave()
    assert hub.join().finished
    assert_same(read_state(hub.state / "snapshots/round-000005"), {name: p.data for name, p in plain.items()})


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_all_owning_all_with_nesterov_is_diloco(start_hub, connect, wire):
    outer = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    recipe = make_recipe(ownership="all", outer={"shared": outer, "experts": outer}, wire=wire)
    hub = start_hub(recipe)
    initial = read_state(hub.state / "rounds/000000")
    # arXiv 2311.08105, algorithm 1
    world = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in initial.items()}
    sgd = torch.optim.SGD(world.values(), lr=0.7, momentum=0.9, nesterov=True)
    workers = [adamw(initial) for _ in range(2)]
    clients = [connect(hub, node) for node in range(2)]
    nodes = []
    for client in clients:
        client.join()
        nodes.append(adamw(pull(client)[1]))
    for round_ in range(3):
        for node in range(2):
            take(workers[node][0], {name: tensor.data for name, tensor in world.items()})
            for step in range(2):
                local_step(recipe, node, 2 * round_ + step, *workers[node])
                local_step(recipe, node, 2 * round_ + step, *nodes[node])
            push(clients[node], round_, {name: p.data for name, p in nodes[node][0].items()})
        for name, parameter in world.items():
            parameter.grad = sum(parameter.data - worker[name].data for worker, _ in workers) / 2
        sgd.step()
        for node, client in enumerate(clients):
            client.wait_round(round_ + 1)
            take(nodes[node][0], pull(client, round_)[1])
    # Another order of the same sums; with codecs, a step of the last changes (0.02 a round) at the most.
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "int8": 2e-3}[wire]
    for name, tensor in read_state(hub.state / "rounds/000003").items():
        assert (world[name].data - initial[name]).abs().max() > 0.02
        torch.testing.assert_close(tensor, world[name].data, rtol=1e-5, atol=tolerance)
        for mine, _ in nodes:
            assert torch.equal(mine[name].data, tensor)
