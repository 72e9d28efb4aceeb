"""The ranks of one node acting as one: rank 0 leads, and an error on any rank ends all of them alike.

Ranks of a node are data-parallel replicas. What they tell each other here goes over a gloo group of its own, as JSON,
so that it works on hosts with and without GPUs, and while rank 0 waits for other nodes for hours.
"""

import datetime
import json
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from spes_mega.crash_report import foreseen_text, summary_of
from spes_mega.errors import SpesError
from spes_mega.node.stop import Stopped

T = TypeVar("T")
Report = dict[str, Any]


class SharedError(SpesError):
    """An error that all ranks of the node know of; rank 0 reports it for all."""

    def __init__(self, message: str, exit_code: int, trace: str = "") -> None:
        """`trace`: the traceback, if it is a fault of the program."""
        super().__init__(message)
        self.exit_code, self.trace = exit_code, trace


class Ranks:
    """This process among the ranks of its node. Needs torch.distributed to be initialized."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: the longest that rank 0 may be away, waiting for other nodes."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience_s))
        on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.where: str | None = None
        """This machine's name, for errors of this rank; None if all ranks are on one machine."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank. If it fails on any, all ranks raise what the first of them raised."""
        result, report = _attempt(action)
        if self.where is not None and report is not None and "message" in report:
            place = self.where if "trace" in report else f"{self.where} (rank {self.rank})"
            report["message"] = f"{place}: {report['message']}"
        failed = torch.tensor([0 if report is None else self.size - self.rank])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if worst := int(failed.item()):
            _raise(self._broadcast(report, source=self.size - worst))
        return cast(T, result)

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone and give its result, which must survive JSON, or its error, to all."""
        result, report = _attempt(action) if self.leads else (None, None)
        answer = self._broadcast([result, report] if self.leads else None, source=0)
        if answer[1] is not None:
            _raise(answer[1])
        return cast(T, result if self.leads else answer[0])

    def everyone(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and give all their results, which must survive JSON, to all. Errors: `agree`."""
        mine = torch.frombuffer(bytearray(json.dumps(self.agree(action)).encode()), dtype=torch.uint8)
        sizes = [int(size.item()) for size in self.gather(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = zip(self.gather(padded), sizes, strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]

    def tensor(self, action: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Run `action` on rank 0 alone and give its fp32 tensor of `shape`, or its error, to all."""
        value, report = _attempt(action) if self.leads else (None, None)
        self._go_on(report)
        if value is None:
            value = torch.empty(shape)
        value = value.to(self.device, torch.float32).contiguous()
        if self.size > 1:
            dist.broadcast(value, src=0)
        return value

    def lead(self, action: Callable[[Callable[[], None]], T], follow: Callable[[], None]) -> T:
        """Run `action(step)` on rank 0, which calls `step()` before each part that needs the other ranks.

        They run `follow` each time; so rank 0 may do other work, and fail, in between. Result and errors as in
        `first`.
        """
        if not self.leads:
            while self._broadcast(None, source=0) == "step":
                follow()
            return self.first(_nothing)

        def step() -> None:
            self._broadcast("step", source=0)

        result, report = _attempt(lambda: action(step))
        self._broadcast("done", source=0)
        return cast(T, self.first(lambda: result if report is None else _raise(report)))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of float64 `values` over the ranks."""
        total = values.to("cpu", torch.float64, copy=True)
        dist.all_reduce(total, group=self._group)
        return total

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The `values`, of one size and dtype, of every rank."""
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values, group=self._group)
        return everyone

    def _go_on(self, report: Report | None) -> None:
        if self.size > 1:
            report = self._broadcast(report, source=0)
        if report is not None:
            _raise(report)

    def _broadcast(self, value: Any, source: int) -> Any:
        if self.size == 1:
            return value
        mine = self.rank == source
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if mine else None
        length = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(length, src=source, group=self._group)
        if data is None:
            data = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.broadcast(data, src=source, group=self._group)
        return value if mine else json.loads(bytes(data.tolist()))


def _nothing() -> Any:
    return None


def _attempt(action: Callable[[], T]) -> tuple[T | None, Report | None]:
    """Result of `action`, or a report of how it failed that other ranks can read."""
    try:
        return action(), None
    except Stopped as e:
        return None, {"signum": e.signum}
    except SpesError as e:
        return None, {"message": str(e), "exit_code": e.exit_code}
    except Exception as e:
        if (foreseen := foreseen_text(e)) is not None:
            return None, {"message": foreseen, "exit_code": 1}
        message = f"{summary_of(e)} (rank {dist.get_rank()})"
        return None, {"message": message, "exit_code": 1, "trace": traceback.format_exc()}


def _raise(report: Report) -> Any:
    if "signum" in report:
        raise Stopped(report["signum"])
    raise SharedError(report["message"], report["exit_code"], report.get("trace", ""))
