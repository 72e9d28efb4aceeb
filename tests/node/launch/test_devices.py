"""CUDA_VISIBLE_DEVICES: the devices that are meant, the CPU, or one line."""

import pytest

from spes_mega.errors import RecipeError
from spes_mega.node.launch import devices
from spes_mega.node.launch.devices import Devices, devices_of

GPU, MIG = "GPU-8f3c5f0a-1111", "MIG-0b2c-2222"


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, of which PyTorch finds `found`."""

    def machine(visible, found):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(devices, "has_gpus", lambda: found is not None)
        monkeypatch.setattr(devices, "count_gpus", lambda: found or 0)

    return machine


@pytest.mark.parametrize("visible", ["-1", "", "NoDevFiles", "none", "0,0"])
@pytest.mark.parametrize("found", [2, None])
def test_no_device_is_the_cpu(machine, visible, found):
    machine(visible, found)
    assert devices_of(None) == Devices("", 1)
    assert devices_of(3) == Devices("", 3)


@pytest.mark.parametrize("visible", [None, "0", "4,6"])
def test_a_machine_without_gpus_trains_on_its_cpu(machine, visible):
    machine(visible, None)
    assert devices_of(None) == Devices("", 1)


@pytest.mark.parametrize(
    ("visible", "found", "ranks", "expected"),
    [
        (None, 2, None, Devices("0,1", 2)),
        (None, 4, 3, Devices("0,1,2", 3)),
        ("4, 6,7", 3, 2, Devices("4,6", 2)),
        ("5,-1,6", 1, None, Devices("5", 1)),
        (f"{GPU},GPU-9", 2, None, Devices(f"{GPU},GPU-9", 2)),
        (MIG, 1, None, Devices(MIG, 1)),
    ],
)
def test_the_devices_that_are_meant(machine, visible, found, ranks, expected):
    machine(visible, found)
    assert devices_of(ranks) == expected


@pytest.mark.parametrize(
    ("visible", "found", "ranks", "message"),
    [
        (GPU, None, None, "CUDA_VISIBLE_DEVICES=GPU-8f3c5f0a-1111: PyTorch finds 0 of these 1"),
        ("0,7", 1, None, "PyTorch finds 1 of these 2 devices"),
        (f"{MIG},MIG-9", 1, None, "a process can use one MIG device"),
        (MIG, 1, 2, "2 ranks need a GPU each, and there are 1"),
        (None, 2, 3, "3 ranks need a GPU each, and there are 2"),
    ],
)
def test_what_cannot_be_is_one_line(machine, visible, found, ranks, message):
    machine(visible, found)
    with pytest.raises(RecipeError, match=message):
        devices_of(ranks)


def test_gpus_that_pytorch_does_not_see_are_told_and_the_cpu_is_used(machine, capsys):
    machine(None, 0)
    assert devices_of(None) == Devices("", 1)
    assert "PyTorch sees none of this machine's GPUs" in capsys.readouterr().err


def test_counting_asks_pytorch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.count_gpus() == 0
