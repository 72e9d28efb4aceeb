import json

import pytest

from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.hub.state.metrics import Metrics
from spes_mega.outer.merging import Similarity


def record(number, **fields):
    return RoundRecord(round=number, step=10 * number, nodes=(0, 1), **fields)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_round_with_the_similarity_of_each_layer(tmp_path):
    metrics = Metrics(tmp_path / "m", [RoundRecord(round=0, step=0)])
    metrics.append(record(1), {})
    metrics.append(record(2, merge_alpha=0.1, similarity=0.3), {1: Similarity(0.25, 0.5)})
    first, second = lines(tmp_path / "m")
    assert (first["round"], first["step"], first["nodes"], "layers" in first) == (1, 10, [0, 1], False)
    assert (second["similarity"], second["layers"]) == (0.3, {"1": {"mean": 0.25, "max": 0.5}})


@pytest.mark.parametrize("torn", ["", '{"round": 3, "st', '{"round"'])
def test_what_a_crash_kept_from_being_written_is_made_up_for(tmp_path, torn):
    path = tmp_path / "m"
    metrics = Metrics(path, [])
    metrics.append(record(1), {})
    metrics.append(record(2), {})
    with path.open("a") as file:
        file.write(torn)
    Metrics(path, [record(1), record(2), record(3)])
    assert [line["round"] for line in lines(path)] == [1, 2, 3]


def test_a_hub_that_was_set_back_drops_the_rounds_that_come_again(tmp_path):
    path = tmp_path / "m"
    metrics = Metrics(path, [])
    for number in (1, 2, 3, 4):
        metrics.append(record(number), {})
    with path.open("a") as file:
        file.write("a remark\n")
    before = path.stat().st_ino
    Metrics(path, [record(1), record(2), record(3), record(4)])
    assert path.stat().st_ino == before  # what has to stay is not written anew
    metrics = Metrics(path, [record(1), record(2)])
    assert path.read_text().count("\n") == 3
    metrics.append(record(3, tokens=5), {})
    *kept, again = path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in kept if line != "a remark"] == [1, 2]
    assert (json.loads(again)["round"], json.loads(again)["tokens"]) == (3, 5)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_line_of_figures_does_not_stop_the_hub(tmp_path):
    (tmp_path / "m").write_text("hello\n")
    Metrics(tmp_path / "m", [record(1)])
    assert (tmp_path / "m").read_text().startswith("hello\n{")
