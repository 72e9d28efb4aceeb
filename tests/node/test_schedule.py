"""The learning rate at points where it can be said by hand."""

import pytest

from spes_mega.node.schedule import learning_rate, owned_balance_weight
from spes_mega.recipe import TrainSection


def test_warm_up_peak_middle_and_end():
    train = TrainSection(steps=110, warmup_steps=10, lr=1e-3, min_lr_ratio=0.1)
    assert learning_rate(1, train) == pytest.approx(1e-4)
    assert learning_rate(5, train) == pytest.approx(5e-4)
    assert learning_rate(10, train) == pytest.approx(1e-3)
    assert learning_rate(60, train) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(110, train) == pytest.approx(1e-4)


def test_without_warm_up_and_with_nothing_but_warm_up():
    assert learning_rate(4, TrainSection(steps=4, lr=1.0, min_lr_ratio=0.0)) == pytest.approx(0.0)
    assert learning_rate(2, TrainSection(steps=4, lr=1.0, min_lr_ratio=0.0)) == pytest.approx(0.5)
    assert learning_rate(4, TrainSection(steps=4, warmup_steps=4, lr=1.0)) == 1.0


def test_warm_up_begins_with_its_fraction_of_the_peak():
    train = TrainSection(steps=2000, warmup_steps=1000, warmup_from=0.1, lr=5e-4)
    assert learning_rate(0, train) == pytest.approx(0.1 * 5e-4)
    assert learning_rate(500, train) == pytest.approx(0.55 * 5e-4)
    assert learning_rate(1000, train) == pytest.approx(5e-4)
    assert learning_rate(1500, train) == learning_rate(1500, TrainSection(steps=2000, warmup_steps=1000, lr=5e-4))


def test_owned_experts_weigh_less_in_the_balance_loss_at_first():
    train = TrainSection(steps=1000, aux_loss_warmup=0.2)
    weights = [owned_balance_weight(step, train) for step in (0, 100, 200, 1000)]
    assert weights == pytest.approx([0.7, 0.85, 1.0, 1.0])
    assert owned_balance_weight(0, TrainSection(steps=1000)) == 1.0
