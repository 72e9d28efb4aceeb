"""What goes wrong in a soak test, drawn from a seed."""

import random
import threading
import time
from collections import Counter
from contextlib import suppress

import grpc
import torch

from spes_mega.errors import SpesError
from spes_mega.wire.frames import frame_of
from tests.hub.fabricated import fabricate, push
from tests.hub.rpc.test_hub import raw_push


class Faults:
    def __init__(self, hub, nodes, seed):
        self._hub, self._nodes = hub, nodes
        self._random = random.Random(seed)
        self.counts = Counter()

    def next(self, hubs_too):
        """Wait for a while, then let something fail."""
        time.sleep(self._random.uniform(1, 5))
        kinds = [self.node_killed, self.line_cut, self.line_silent, self.line_slow, self.bad_push, self.stray_pushes]
        kind = self._random.choice([*kinds, *kinds, *kinds, self.hub_killed] if hubs_too else kinds)
        node = self._random.choice(self._nodes)
        self.counts[kind.__name__] += 1
        with suppress(SpesError, ValueError, grpc.RpcError):  # of a bad push, or of one on a line that has failed
            kind(node)

    def hub_killed(self, node):
        self._hub.restart()

    def node_killed(self, node):
        node.kill()

    def line_cut(self, node):
        node.line.cut_after(self._random.choice(["up", "down"]), self._random.randrange(100_000))

    def line_silent(self, node):
        node.line.silence()
        threading.Timer(self._random.uniform(0.2, 5), node.line.speak).start()

    def line_slow(self, node):
        node.line.bytes_per_s, node.line.delay_s = 200_000, 0.01
        threading.Timer(self._random.uniform(1, 5), self._mend, [node.line]).start()

    @staticmethod
    def _mend(line):
        line.bytes_per_s, line.delay_s = None, 0.0

    def bad_push(self, node):
        tensors = fabricate(node.recipe, node.node, 0)
        tensors["model.norm.weight"][0] = float("nan")
        with node.impostor() as client:
            push(client, self._hub.round(), tensors)

    def stray_pushes(self, node):
        size = sum(torch.Size(t.shape).numel() for t in fabricate(node.recipe, node.node, 0).values()) * 4 + 1000
        with node.impostor() as client:
            for _ in range(20):
                payload, round_ = f"{self._random.random()}", self._hub.round() + self._random.choice([-1, 0, 0, 0, 1])
                with suppress(SpesError, grpc.RpcError):
                    raw_push(client, [frame_of(0, bytes(1000))], size, payload=payload, round=max(round_, 0))
