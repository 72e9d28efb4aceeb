"""A node of a soak test: a thread that trains by fabrication, and begins anew when its connection dies."""

import random
import threading
import time

from spes_mega.client.client import HubClient, StaleRoundError
from spes_mega.security.access import Access
from tests.hub.fabricated import fabricate, make_recipe, pull, push
from tests.hub.process import TOKEN
from tests.hub.relay import Relay

NODES = 8
TRAINING_S = 1.0
"""At most, for a round: without it the rounds would be over before much had failed."""


class Node(threading.Thread):
    def __init__(self, node, raw, hub_address):
        super().__init__(daemon=True)
        self.node = node
        self.recipe = make_recipe(
            raw["model"], raw["train"], **raw["spes"] | {"round_deadline_s": 120, "rpc_deadline_s": 120}
        )
        self.line = Relay(hub_address)
        self.sent = {}
        """The newest payload for each round. A process pushes only what no earlier one has: it is what counts."""
        self.lives = 0
        self._client = None
        self._random = random.Random(node)

    def run(self):
        while True:
            try:
                with self.connect() as self._client:
                    self.lives += 1
                    self._keep_what_is_sent(self._client)
                    self._train(self._client)
                    return
            except Exception:  # killed, in whatever call it was
                time.sleep(self._random.uniform(0, 1.5))

    def kill(self):
        """All connections of this process are gone at once, and it says nothing more."""
        if self._client is not None:
            self._client.close()

    def connect(self):
        return HubClient.for_recipe(self.recipe, self.line.address, self.node, access=Access(TOKEN))

    def impostor(self):
        """Another connection of the same process."""
        client = HubClient(self.line.address, self.node, self.recipe.digest(), access=Access(TOKEN), rpc_deadline_s=5)
        if self._client is not None:
            client._caller.CopyFrom(self._client._caller)
        return client

    def _keep_what_is_sent(self, client):
        send = client._delivery.send

        def keeping(file, opening):
            file.seek(0)
            self.sent[opening.round] = file.read()
            send(file, opening)

        client._delivery.send = keeping

    def _train(self, client):
        joined = client.join()
        if joined.pushed:
            client.wait_round(joined.round + 1)
        round_, state = pull(client)
        while round_ < self.recipe.num_rounds:
            time.sleep(self._random.uniform(0, TRAINING_S))
            mine = {name: state[name] + 0.1 * step for name, step in fabricate(self.recipe, self.node, round_).items()}
            try:
                push(client, round_, mine)
            except StaleRoundError:
                client.wait_round(round_ + 1)
                round_, state = pull(client)
                continue
            client.wait_round(round_ + 1)
            state.update(mine)
            round_, news = pull(client, round_)
            state.update(news)
        client.leave()
