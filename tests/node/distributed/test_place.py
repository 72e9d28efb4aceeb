"""Where a rank stands, by what launchers and Slurm set, and what its machines have to have in common."""

import pytest

from spes_mega.errors import DataError, RecipeError, SpesError
from spes_mega.node.distributed.machines import compare, compare_data
from spes_mega.node.distributed.place import first_host, from_slurm, place_of

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}  # fmt: skip
STEP = {
    "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "2",
}  # fmt: skip


def test_a_place_under_torchrun():
    place = place_of(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.machine) == (5, 8, 1, 4, 1)
    assert (place.master_addr, place.master_port) == ("a", 29500)


def test_a_place_under_srun():
    place = place_of(STEP | from_slurm(STEP))
    assert (place.rank, place.size, place.local_rank, place.local_size, place.machine) == (6, 7, 2, 3, 1)
    assert place.master_addr == "gpu07"
    assert place.master_port == 20_000 + (31 * 123 + 2) % 12_000
    chosen = from_slurm(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("10.0.0.1", "7")
    assert from_slurm(STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"})["LOCAL_SIZE"] == "8"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("n[01-04]x,m", "n01x"), ("10.0.0.1", "10.0.0.1"),
     ("a-b.c[9]", "a-b.c9")],
)  # fmt: skip
def test_the_first_machine_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
def test_what_a_launcher_left_out_is_named(name):
    with pytest.raises(SpesError, match=f"{name} is not set"):
        place_of({key: value for key, value in TORCHRUN.items() if key != name})
    with pytest.raises(SpesError, match=f"{name} is '-1'"):
        place_of(TORCHRUN | {name: "-1"})


def test_a_rank_beyond_the_last_is_refused():
    with pytest.raises(SpesError, match="RANK is 8, but WORLD_SIZE 8"):
        place_of(TORCHRUN | {"RANK": "8"})


def facts(host, torch="2.13", lr=0.1, hub=True):
    return {
        "host": host, "machine": 0, "versions": {"torch": torch}, "device": "cpu", "options": {"--hub": hub},
        "recipe": {"digest": str(lr), "fields": {"train": {"lr": lr}}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        ({"torch": "2.12"}, SpesError, "a (rank 0) and b (rank 1) differ: versions.torch 2.13 and 2.12"),
        ({"lr": 0.2}, RecipeError, "a (rank 0) and b (rank 1) differ: recipe.digest 0.1 and 0.2; train.lr 0.1 and 0.2"),
        ({"hub": False}, RecipeError, "a (rank 0) and b (rank 1) differ: --hub True and False"),
    ],
)
def test_machines_that_differ_are_named_with_what_differs(other, kind, said):
    compare([facts("a"), facts("b")])
    with pytest.raises(kind) as refused:
        compare([facts("a"), facts("b", **other)])
    assert said in str(refused.value)
    assert type(refused.value) is kind


def test_data_that_differ_are_described():
    first, same, other = ("a", {"tokens": 1}, "one"), ("b", {"tokens": 1}, "one"), ("c", {"tokens": 2}, "two")
    compare_data([first, None, same])
    with pytest.raises(DataError, match=r"a \(rank 0\) and c \(rank 3\) have different training data: one; and two"):
        compare_data([first, None, same, other])
