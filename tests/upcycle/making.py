"""Upcycling as the command does it, without the command line."""

import torch

from spes_mega.recipe import UpcycleSection
from upcycle.pipeline import upcycle
from upcycle.plan import make_plan
from upcycle.router.calibration import calibrate
from upcycle.sources import open_sources
from upcycle.verify.side_by_side import verify


def run(src, out, config=None, calibration=None, **settings):
    """Upcycle `src` (a path, or several in a list) to `out`; returns the plan."""
    with open_sources(src if isinstance(src, list) else [src], config) as sources:
        plan = make_plan(sources, UpcycleSection(**settings))
        upcycle(sources, out, plan, calibrate(sources, plan, calibration) if calibration else None)
    return plan


def verified(src, out, plan, config=None):
    """Verify `out` against `src`."""
    with open_sources(src if isinstance(src, list) else [src], config) as sources:
        return verify(sources, out, plan)


def randomized(model):
    """A transformers model with every weight away from its default, so that swapped or lost tensors show."""
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
    return model
