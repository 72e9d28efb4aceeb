"""How long a round takes, and how much memory, beside one plain TCP stream on loopback and the disk."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import grpc_alone
import yaml
from measure import cpu_seconds, disk_bytes_per_s, loopback_bytes_per_s, peak_rss_bytes
from shapes import SHAPES, make_recipe, num_parameters, parsed

from spes_mega.wire.frames import chunk_bytes

sys.path.append(str(Path(__file__).parents[1]))
from scratch import scratch

_HERE = Path(__file__).parent
LIMIT = 6
"""A round may take so many times as long as its bytes would take through one plain TCP stream."""
_FIRST = 3
"""Rounds in which files are made that later ones write over."""


class Worker:
    """A child process that is spoken to in lines."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.process.args!r} ended with {self.process.wait()}")
        return line.strip()

    def hear_json(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(self.hear())
        return heard

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@click.command()
@click.option("--params", type=click.Choice(list(SHAPES)), default="200M", show_default=True)
@click.option("--nodes", default=4, show_default=True)
@click.option("--codec", type=click.Choice(["fp32", "bf16", "int8"]), default="fp32", show_default=True)
@click.option("--merge", is_flag=True, help="merge experts in every round")
@click.option("--rounds", default=5, show_default=True, help=f"measured ones; {_FIRST} come before them")
@click.option("--train-s", default=3.0, show_default=True, help="seconds of training between rounds")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/benchmark-hub"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def main(
    params: str, nodes: int, codec: str, merge: bool, rounds: int, train_s: float, folder: Path, as_json: bool
) -> None:
    """Let one hub and NODES clients with fabricated weights go through rounds, and print what a round took.

    A round begins when all nodes have their trained values, and ends when all hold the next state. limit_s is 6 times
    what all its bytes, of all nodes and both ways, would take through one plain TCP stream; grpc_alone_s is what they
    take through gRPC without files, checksums or weights. Figures are medians.

    behind_cpu_s is what hub and nodes do between rounds, while the nodes train (here they wait): they keep the new
    state.
    """
    raw = make_recipe(params, nodes, _FIRST + rounds, codec, merge)
    with scratch(folder):
        (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
        loopback, disk = loopback_bytes_per_s(), disk_bytes_per_s(folder)
        measured = _measure(folder, nodes, rounds, train_s)
    moved = nodes * (measured["bytes_up_per_node"] + measured["bytes_down_per_node"])
    figures: dict[str, Any] = {
        "round_s": measured.pop("round_s"),
        "limit_s": LIMIT * moved / loopback,
        "grpc_alone_s": grpc_alone.seconds(
            nodes, measured["bytes_up_per_node"], measured["bytes_down_per_node"], chunk_bytes(nodes)
        ),
        **measured,
        "loopback_bytes_per_s": round(loopback),
        "disk_bytes_per_s": round(disk),
        "parameters": num_parameters(parsed(raw)),
    }
    figures = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


def _measure(folder: Path, nodes: int, rounds: int, train_s: float) -> dict[str, Any]:
    workers: list[Worker] = []
    try:
        state = ["--state", folder / "state", "--listen", "127.0.0.1:0", "--json"]
        hub = Worker("-m", "spes_mega.cli", "hub", folder / "recipe.yaml", *state)
        workers.append(hub)
        address = _await_event(hub, "listening")["address"]
        clients = [Worker(_HERE / "node.py", folder, address, node) for node in range(nodes)]
        workers += clients
        started = [client.hear_json() for client in clients]
        taken = [_round(hub, clients, train_s) for _ in range(_FIRST + rounds)][_FIRST:]
        figures = _figures(taken, started) | {"hub_peak_rss_bytes": peak_rss_bytes(hub.pid)}
        _all(clients, "end")
        _await_event(hub, "end")
        return figures
    finally:
        for worker in workers:
            worker.end()


def _round(hub: Worker, clients: list[Worker], train_s: float) -> dict[str, Any]:
    _all(clients, "train")
    time.sleep(train_s)
    for client in clients:
        assert client.hear() == "trained"
    hub_before, nodes_before = cpu_seconds(hub.pid), sum(cpu_seconds(client.pid) for client in clients)
    started = time.perf_counter()
    _all(clients, "exchange")
    for client in clients:
        assert client.hear() == "done"
    seconds = time.perf_counter() - started
    hub_after = cpu_seconds(hub.pid)
    spent = {
        "round_s": seconds,
        "hub_cpu_s": hub_after - hub_before,
        "clients_cpu_s": sum(cpu_seconds(client.pid) for client in clients) - nodes_before,
        "aggregation_s": _await_event(hub, "round")["aggregation_seconds"],
    }
    nodes = [client.hear_json() for client in clients]
    spent["behind_cpu_s"] = cpu_seconds(hub.pid) - hub_after + sum(node["behind_cpu_s"] for node in nodes)
    if len({node["checksum"] for node in nodes}) > 1:
        raise SystemExit("the nodes hold different shared weights")
    return spent | {"nodes": nodes}


def _figures(rounds: list[dict[str, Any]], started: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return median(map(value, rounds))

    def over_nodes(key: str) -> int:
        return round(middle(lambda taken: sum(node[key] for node in taken["nodes"]) / len(taken["nodes"])))

    held = started[0]["held_bytes"]
    return {
        **{key: middle(lambda taken, key=key: taken[key]) for key in rounds[0] if key != "nodes"},  # type: ignore[misc]
        "client_peak_rss_bytes": max(node["peak_rss_bytes"] - held for taken in rounds for node in taken["nodes"]),
        "client_idle_rss_bytes": max(node["idle_rss_bytes"] for node in started),
        "bytes_up_per_node": over_nodes("bytes_up"),
        "bytes_down_per_node": over_nodes("bytes_down"),
    }


def _all(workers: list[Worker], line: str) -> None:
    for worker in workers:
        worker.tell(line)


def _await_event(hub: Worker, event: str) -> dict[str, Any]:
    while (heard := hub.hear_json())["event"] != event:
        pass
    return heard


if __name__ == "__main__":
    main()
