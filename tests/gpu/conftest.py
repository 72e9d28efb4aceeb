"""Tests that need a CUDA device; `pytest tests/gpu` runs all of them, with Transformer Engine or without."""

import importlib.util

import pytest
import torch

IMPLEMENTATIONS = ("local", "transformer_engine")


def pytest_runtest_setup(item):
    if item.get_closest_marker("requires_gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """`model.implementation`: the local modules, and Transformer Engine's where they are installed."""
    if request.param == "transformer_engine":
        skip_without_transformer_engine()
    return request.param


@pytest.fixture
def transformer_engine():
    skip_without_transformer_engine()


def skip_without_transformer_engine():
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
