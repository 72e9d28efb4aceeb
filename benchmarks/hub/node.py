"""One node without a model: it holds fabricated weights, and does with the hub all that a training node does.

It is driven by lines. At `train` it changes its weights and prints `trained`; at `exchange` it pushes, waits for the
round, pulls, takes over what came, and prints `done` and a line of figures; at `end` it leaves.
"""

import json
import sys
import time
import zlib
from pathlib import Path

import torch
import yaml
from measure import peak_rss_bytes, reset_peak_rss, rss_bytes
from shapes import parsed

from spes_mega.client.client import HubClient, Pulled
from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.layout.storage.tensor_bytes import bytes_of
from spes_mega.outer.ownership import pushed_names
from spes_mega.recipe import Recipe

_HELD_BYTES = 1 << 30


class FabricatedWeights:
    """fp32 tensors of a model's names and shapes.

    Models over 1 GiB take their tensors from the same memory again, so that many nodes have room on one machine.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self.overlap = 4 * sum(sizes.values()) > _HELD_BYTES
        length = max(_HELD_BYTES // 4, *sizes.values()) if self.overlap else sum(sizes.values())
        self.numbers = torch.zeros(length)
        self.tensors, at = {}, 0
        for name, size in sizes.items():
            at = 0 if at + size > length else at
            self.tensors[name] = self.numbers[at : at + size].view(shapes[name])
            at += size

    def train(self, node: int) -> None:
        """Some other finite values, at little cost."""
        self.numbers.mul_(0.999).add_(1e-4 * (node + 1))

    def take(self, pulled: Pulled) -> None:
        for name, tensor in pulled:
            self.tensors[name].copy_(tensor)

    def checksum(self) -> int:
        """Of what all nodes hold alike."""
        total = 0
        for name, tensor in self.tensors.items():
            if expert_of(name) is None:
                total = zlib.crc32(bytes_of(tensor), total)
        return total


class Behind:
    """CPU time of all threads but this one, which goes through the rounds."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began = self._spent()

    def seconds(self) -> float:
        return self._spent() - self._began

    def _spent(self) -> float:
        return time.process_time() - time.thread_time()


def main(folder: Path, address: str, node: int) -> None:
    torch.set_num_threads(1)
    recipe = parsed(yaml.safe_load((folder / "recipe.yaml").read_text()))
    idle = rss_bytes()
    with HubClient.for_recipe(recipe, address, node, spool_dir=folder) as client:
        client.join()
        weights = FabricatedWeights(expected_tensors(recipe.model))
        with client.pull() as pulled:
            weights.take(pulled)
            round_ = pulled.round
        print(json.dumps({"idle_rss_bytes": idle, "held_bytes": weights.numbers.nbytes}), flush=True)
        behind = Behind()
        for line in map(str.strip, sys.stdin):
            if line == "train":
                weights.train(node)
                reset_peak_rss()
                print("trained", flush=True)
            elif line == "exchange":
                round_ = exchange(client, recipe, weights, round_, behind)
            elif line == "end":
                client.leave()


def exchange(client: HubClient, recipe: Recipe, weights: FabricatedWeights, round_: int, behind: Behind) -> int:
    """One round's synchronization; prints `done` as soon as the next state is there, and then its figures."""
    behind_cpu_s = behind.seconds()
    up, down = client.bytes_up, client.bytes_down
    owned = recipe.ownership()
    mine = pushed_names(weights.tensors, owned, client.node, expert_of)
    shapes = {name: tuple(weights.tensors[name].shape) for name in mine}
    client.push(round_, shapes, ((name, weights.tensors[name]) for name in mine), tokens=1)
    client.wait_round(round_ + 1)
    with client.pull(round_) as pulled:
        weights.take(pulled)
    print("done", flush=True)
    behind.begin()
    figures = {
        "bytes_up": client.bytes_up - up,
        "bytes_down": client.bytes_down - down,
        "behind_cpu_s": behind_cpu_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "checksum": None if weights.overlap else weights.checksum(),
    }
    print(json.dumps(figures), flush=True)
    return pulled.round


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
