"""A synchronization that is under way while the node trains on (on rank 0)."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from spes_mega.client.client import HubClient, Pulled, StaleRoundError
from spes_mega.node.sync.spool import TensorSpool


def moved(published: torch.Tensor, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """published + (now - before), and `now` itself where `published` is `before`. All fp32, of one shape."""
    return torch.where(published == before, now, published + (now - before))


@dataclass(frozen=True)
class Arrived:
    """What a flight brought."""

    pulled: Pulled
    before: TensorSpool
    """What the node has trained from since the flight took off."""
    in_time: bool
    """False: the hub closed the round without this node, and the state lacks what it pushed."""

    def with_progress(self, name: str, now: torch.Tensor) -> torch.Tensor:
        """What the node goes on from, of a tensor that is `now` what it trained."""
        if name not in self.pulled:
            return now
        return moved(self.pulled.read(name), self.before.get(name), now)

    def close(self) -> None:
        """Free the files."""
        self.pulled.close()
        self.before.close()


class Flight:
    """The push of a round, the wait for its close, and the pull, in a thread of their own."""

    def __init__(self, client: HubClient, round_: int, snapshot: TensorSpool, tokens: int) -> None:
        """Pushes `snapshot`; `tokens` as in `HubClient.push`.

        Until it has landed, nothing else may push or pull with `client`.
        """
        self._round, self._snapshot = round_, snapshot
        self._client, self._tokens = client, tokens
        self._landed: Future[Arrived] = Future()
        threading.Thread(target=self._run, name=f"round {round_}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._landed.set_result(self._fly())
        except BaseException as e:  # it is raised where the result is asked for
            self._landed.set_exception(e)

    def _fly(self) -> Arrived:
        snapshot = self._snapshot
        shapes = snapshot.shapes
        try:
            tensors = ((name, snapshot.get(name)) for name in shapes)
            self._client.push(self._round, shapes, tensors, self._tokens)
        except StaleRoundError:
            return Arrived(self._client.pull(), snapshot, in_time=False)
        self._client.wait_round(self._round + 1)
        return Arrived(self._client.pull(self._round), snapshot, in_time=True)

    def wait(self) -> Arrived:
        """Wait until it has landed. Raises what ended it: what `HubClient.push`, `wait_round` and `pull` raise."""
        return self._landed.result()

    def abandon(self) -> None:
        """End it wherever it is; the hub may have the push then, or not."""
        self._client.interrupt(self._landed.exception)
        if self._landed.exception() is None:
            self._landed.result().pulled.close()
        self._snapshot.close()
