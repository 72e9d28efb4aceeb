"""The order of steps, exchanges and lines, with a trainer and a weight source that only take notes."""

import json
import math
from dataclasses import replace

import pytest

from spes_mega.errors import CheckpointError, DataError, DeadlineError, SpesError
from spes_mega.node.loop import NodeRun
from spes_mega.node.metrics import MetricsFile, StepMetrics
from spes_mega.node.stop import Stopped
from spes_mega.node.sync.weight_source import Position, Traffic
from spes_mega.recipe import Recipe

MODEL = {
    "family": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
    "ffn_hidden_size": 8, "vocab_size": 8,
}  # fmt: skip


class Notes:
    """Trainer and weight source at once."""

    tokens_per_step = 10
    keeps_result = False

    def __init__(self, next_rounds=None, loss=1.0, stop_at=None, grad_norm=1.0, error=None):
        self.stop_at, self.grad_norm, self.error, self.samples = stop_at, grad_norm, error or Stopped(15), []
        self.events, self.next_rounds, self.loss = [], next_rounds or {}, loss
        self.traffic = Traffic()

    def after(self, at):
        return Position(at.round, at.step + 1, at.tokens + self.tokens_per_step, at.samples + 3)

    def step(self, at):
        step, round_ = at.step + 1, at.round
        if step == self.stop_at:
            raise self.error
        self.samples.append(at.samples)
        self.events.append(f"step {step} of round {round_}")
        return StepMetrics(
            step=step, round=round_, lm_loss=self.loss, aux_loss=0.0, z_loss=0.0, logit_z_loss=0.0,
            grad_norm=self.grad_norm, lr=0.1, tokens_per_s=1.0,
        )  # fmt: skip

    def exchange(self, weights, round_, tokens):
        self.events.append(f"exchange {round_} after {tokens} tokens")
        self.traffic = Traffic(seconds=1.5, bytes_up=3, bytes_down=4)
        following = self.next_rounds.get(round_, round_ + 1)
        if isinstance(following, Exception):
            raise following
        return following

    def finish(self, weights):
        self.events.append("finish")

    def save(self, model, at, source):
        self.events.append(f"save {at.round} {at.step} {at.tokens}")

    def take_traffic(self):
        taken, self.traffic = self.traffic, Traffic()
        return taken


def run(tmp_path, notes, round_=0, begin=None, every=100):
    raw = {"model": MODEL, "spes": {"sync_every": 2}, "train": {"steps": 5}, "checkpoint": {"every": every}}
    recipe = Recipe.model_validate(raw)
    begin = replace(begin or Position(round_, recipe.step_at(round_)), samples=50)
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as metrics:
        NodeRun(recipe, notes, None, notes, None, metrics, notes, node=3).run(begin)


def written(tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["sync_seconds"], row["bytes_up"], row["bytes_down"]) for row in rows]


def test_rounds_end_with_an_exchange_whose_cost_is_on_the_last_line(tmp_path):
    notes = Notes()
    run(tmp_path, notes)
    assert notes.events == [
        "step 1 of round 0", "step 2 of round 0", "exchange 0 after 20 tokens",
        "step 3 of round 1", "step 4 of round 1", "exchange 1 after 20 tokens",
        "step 5 of round 2", "exchange 2 after 10 tokens", "finish",
    ]  # fmt: skip
    assert written(tmp_path) == [(1, 0, 0, 0), (2, 1.5, 3, 4), (3, 0, 0, 0), (4, 1.5, 3, 4), (5, 1.5, 3, 4)]


def test_after_rounds_that_others_closed_the_node_goes_on_at_the_newest(tmp_path):
    notes = Notes(next_rounds={0: 2})
    run(tmp_path, notes)
    assert notes.events[2:] == [
        "exchange 0 after 20 tokens", "step 5 of round 2", "exchange 2 after 10 tokens", "finish"
    ]  # fmt: skip
    late = Notes()
    run(tmp_path, late, round_=3)
    assert late.events == ["finish"]


def test_a_failed_exchange_still_leaves_the_line_of_its_step(tmp_path):
    notes = Notes(next_rounds={1: DeadlineError("node 1 is absent")})
    with pytest.raises(DeadlineError, match="node 1"):
        run(tmp_path, notes)
    assert [row[0] for row in written(tmp_path)] == [1, 2, 3, 4]
    assert notes.events[-1] == "save 1 4 20"  # so that the round can be pushed when the hub is back


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ({"loss": math.nan}, "the loss is nan"),
        ({"grad_norm": math.nan}, "the gradient's norm is nan"),
        ({"grad_norm": math.inf}, "the gradient's norm is inf"),
        ({"grad_norm": -1.0}, "the gradient's norm is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("begin", [Position(0, 0), Position(0, 1)])  # the second is a round's last step
def test_figures_that_are_not_finite_end_the_run_before_anything_is_sent_or_saved(tmp_path, figures, fault, begin):
    notes = Notes(**figures)
    with pytest.raises(SpesError, match=f"^node 3, step {begin.step + 1}: {fault}; training has diverged"):
        run(tmp_path, notes, begin=begin, every=1)
    assert notes.events == [f"step {begin.step + 1} of round 0"]


def saves(notes):
    return [event.removeprefix("save ") for event in notes.events if event.startswith("save")]


def test_checkpoints_are_written_when_due_and_at_the_end_of_a_round_after_the_exchange(tmp_path):
    notes = Notes()
    run(tmp_path, notes, every=1)
    assert saves(notes) == ["0 1 10", "1 2 0", "1 3 10", "2 4 0", "3 5 0"]
    assert notes.events[2:5] == ["step 2 of round 0", "exchange 0 after 20 tokens", "save 1 2 0"]
    skipping = Notes(next_rounds={0: 2})  # others were faster: step 3 never comes
    run(tmp_path, skipping, every=3)
    assert saves(skipping) == ["2 4 0"]


def test_one_who_is_stopped_writes_where_it_is(tmp_path):
    in_mid_round, in_the_exchange = Notes(stop_at=4), Notes(next_rounds={1: Stopped(15)})
    for notes, expected in ((in_mid_round, "1 3 10"), (in_the_exchange, "1 4 20")):
        with pytest.raises(Stopped):
            run(tmp_path, notes)
        assert notes.events[-1] == f"save {expected}"
    unchanged = Notes(stop_at=3)
    with pytest.raises(Stopped):
        run(tmp_path, unchanged, round_=1)
    assert unchanged.events == []
    already = Notes(stop_at=4)
    with pytest.raises(Stopped):
        run(tmp_path, already, every=3)
    assert saves(already) == ["1 3 10"]


def test_a_round_goes_on_in_its_midst_with_the_tokens_that_it_has(tmp_path):
    notes = Notes()
    run(tmp_path, notes, begin=Position(1, 3, 7))
    assert notes.events[:2] == ["step 4 of round 1", "exchange 1 after 17 tokens"]
    before_the_exchange = Notes()
    run(tmp_path, before_the_exchange, begin=Position(1, 4, 20))
    assert before_the_exchange.events[:2] == ["exchange 1 after 20 tokens", "step 5 of round 2"]
    assert [row[0] for row in written(tmp_path)] == [5]


def test_data_that_a_step_cannot_begin_with_ends_the_run_where_it_is(tmp_path):
    notes = Notes(stop_at=4, error=DataError("token 5 of document 1 is 99"))
    with pytest.raises(DataError, match="document 1"):
        run(tmp_path, notes)
    assert notes.events[-1] == "save 1 3 10"


def test_samples_follow_one_another_whatever_rounds_others_closed_meanwhile(tmp_path):
    notes = Notes(next_rounds={0: 2})
    run(tmp_path, notes)
    assert notes.samples == [50, 53, 56]


class Result(Notes):
    """A source that writes the trained model, and a saver; either may find the disk full."""

    keeps_result = True

    def __init__(self, *full):
        super().__init__()
        self.full = full

    def finish(self, weights):
        super().finish(weights)
        self._write("finish")

    def save(self, model, at, source):
        super().save(model, at, source)
        self._write("save")

    def close(self):
        self.events.append("durable")

    def discard(self):
        self.events.append("discard")

    def _write(self, what):
        if what in self.full:
            raise CheckpointError("disk full")


def test_the_last_step_is_in_a_checkpoint_before_the_result_is_written(tmp_path):
    notes = Result("finish")
    with pytest.raises(CheckpointError, match=r"disk full\. The last step is in a checkpoint: "):
        run(tmp_path, notes)
    assert notes.events[-3:] == ["save 3 5 0", "durable", "finish"]


def test_without_room_for_a_checkpoint_the_result_is_written_all_the_same(tmp_path):
    notes = Result("save")
    run(tmp_path, notes)
    assert notes.events[-3:] == ["save 3 5 0", "discard", "finish"]
    hopeless = Result("save", "finish")
    with pytest.raises(CheckpointError) as error:
        run(tmp_path, hopeless)
    assert str(error.value) == "disk full"
