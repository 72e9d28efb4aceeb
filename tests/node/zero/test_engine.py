"""The parameter groups and the norms of gradients."""

import pytest
import torch
from torch import nn

from spes_mega.node.zero.deepspeed_patches import norms_of_parts
from spes_mega.node.zero.engine import in_pieces, parameter_groups
from spes_mega.recipe import TrainSection

TRAIN = TrainSection(weight_decay=0.1)


def test_matrices_decay_and_norms_do_not_and_empty_groups_are_dropped():
    matrix, norm, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    frozen.requires_grad_(False)
    assert parameter_groups([norm, matrix, frozen], TRAIN) == [
        {"params": [matrix], "weight_decay": 0.1},
        {"params": [norm], "weight_decay": 0.0},
    ]
    assert parameter_groups([matrix, frozen], TRAIN) == [{"params": [matrix], "weight_decay": 0.1}]


def test_with_decay_norms_everything_decays():
    matrix, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    train = TrainSection(weight_decay=0.1, decay_norms=True)
    assert parameter_groups([norm, matrix], train) == [{"params": [norm, matrix], "weight_decay": 0.1}]


def test_large_groups_are_cut_between_parameters():
    parameters = [nn.Parameter(torch.ones(n)) for n in (4, 4, 3, 20, 1, 1)]
    norms = {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0}
    pieces = in_pieces([{"params": parameters, "weight_decay": 0.1}, norms], 8)
    assert [[p.numel() for p in piece["params"]] for piece in pieces] == [[4, 4], [3], [20], [1, 1], [2]]
    assert [piece["weight_decay"] for piece in pieces] == [0.1, 0.1, 0.1, 0.1, 0.0]
    assert [p for piece in pieces[:4] for p in piece["params"]] == parameters


def test_ages_have_groups_of_their_own_the_oldest_first():
    old, new, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    age = {id(old): 7, id(new): 0, id(norm): 7}
    assert parameter_groups([norm, new, old], TRAIN, lambda p: age[id(p)]) == [
        {"params": [old], "weight_decay": 0.1},
        {"params": [new], "weight_decay": 0.1},
        {"params": [norm], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_norms_of_parts_is_exact_to_a_few_millionths(dtype):
    gradient = (1e-3 * torch.randn(3, 500_001, generator=torch.Generator().manual_seed(0))).to(dtype)
    norms = norms_of_parts(gradient)
    assert norms.dtype == torch.float32
    assert norms.double().norm().item() == pytest.approx(gradient.double().norm().item(), rel=5e-6)
