"""Lines on disk and on the console."""

import io
import json

import pytest
from rich.console import Console

from spes_mega.node.metrics import ConsoleReport, MetricsFile, StepMetrics


def metrics_of(step, **values):
    defaults = {"round": 0, "lm_loss": 2.5, "aux_loss": 1.1, "z_loss": 0.2, "logit_z_loss": 9.0, "grad_norm": 0.75}
    return StepMetrics(step=step, **defaults | {"lr": 1e-3, "tokens_per_s": 640.0} | values)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_hold_every_field_and_null_for_what_is_not_finite(tmp_path):
    file = MetricsFile(tmp_path / "node-0/metrics.jsonl", 0)
    file.write(metrics_of(1, bytes_up=7, tokens_per_expert=[[3, 5]], grad_norm=float("inf")))
    (line,) = lines(tmp_path / "node-0/metrics.jsonl")
    assert line == {
        "step": 1, "round": 0, "lm_loss": 2.5, "aux_loss": 1.1, "z_loss": 0.2, "logit_z_loss": 9.0, "grad_norm": None,
        "lr": 1e-3, "tokens_per_s": 640.0, "sync_seconds": 0.0, "bytes_up": 7, "bytes_down": 0,
        "tokens_per_expert": [[3, 5]],
    }  # fmt: skip


@pytest.mark.parametrize(("done", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_node_that_comes_back_drops_what_it_will_do_again(tmp_path, done, kept):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(metrics_of(step))
    file.close()
    with path.open("a") as stream:
        stream.write('{"step": 4, "lm')
    MetricsFile(path, done).write(metrics_of(done + 1))
    assert [line["step"] for line in lines(path)] == [*kept, done + 1]


def test_a_new_run_sets_the_figures_of_an_older_one_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).write(metrics_of(1, lm_loss=7.0))
    MetricsFile(path, 0).write(metrics_of(1, lm_loss=6.0))
    assert [line["lm_loss"] for line in lines(path)] == [6.0]
    assert [line["lm_loss"] for line in lines(tmp_path / "metrics.jsonl.old")] == [7.0]


def test_plain_lines_every_log_every_steps_and_at_the_end():
    stream = io.StringIO()
    with ConsoleReport(3, steps=5, log_every=2, console=Console(file=stream)) as report:
        for step in range(1, 6):
            report.step(metrics_of(step, round=1))
    output = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in output] == [f"node 3: step {s}/5 round 1" for s in (2, 4, 5)]
    assert output[0].endswith("loss 2.5000  grad 0.75  lr 1.00e-03  640 tokens/s")


def test_a_terminal_gets_a_bar_with_the_latest_figures_and_lines_above_it():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160)
    with ConsoleReport(0, steps=3, log_every=2, console=console) as report:
        report.say("hello [there]")
        for step in (1, 2, 3):
            report.step(metrics_of(step))
    output = stream.getvalue()
    assert "node 0: hello [there]" in output
    assert "3/3" in output
    assert "loss 2.5000" in output
    assert "step 2/3" not in output
