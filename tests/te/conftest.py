"""Models of Transformer Engine's modules on a machine without a GPU (`make te-check`)."""

from unittest import mock

import pytest
import torch

from spes_mega.model import build, ensure_parallel_state
from tests.model import tiny


@pytest.fixture(scope="session")
def build_te():
    """Builds on the CPU, like `tiny.loaded` before anything is loaded. Nothing of it can run."""
    ensure_parallel_state()  # which looks for CUDA, too

    def build_(model, owned=None, **train):
        asked = model.model_copy(update={"implementation": "transformer_engine"})
        # All that keeps Transformer Engine's modules from being made here is that somebody asks for a GPU.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return build(tiny.recipe(asked, **train), owned, "cpu")

    return build_
