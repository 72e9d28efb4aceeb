"""What stands beside and inside a result about where it comes from. No times and no paths: same work, same bytes."""

import json
from typing import Any

import yaml

from spes_mega import __version__
from spes_mega.recipe import Recipe, SpesSection, TrainSection
from upcycle.plan import Plan
from upcycle.router.calibration import Calibration
from upcycle.sources import Sources

DIGEST_RULE = (
    "sha256 over one line for each tensor, in canonical order: name, dtype, shape, sha256 of its bytes; "
    "the same for any layout of files"
)
_RECIPE_HEADER = """\
# A starting recipe for this model. Set the number of nodes, steps and batch (`spes-mega recipe` explains all fields),
# then:
#   spes-mega hub recipe.yaml --init THIS_FOLDER --state STATE --listen HOST:PORT
#   spes-mega launch recipe.yaml --node K --hub HOST:PORT --data PREFIX
"""


def metadata(plan: Plan, digests: list[str]) -> dict[str, str]:
    """For the header of each safetensors file."""
    return {
        "spes_mega_version": __version__,
        "upcycle": json.dumps(plan.settings.model_dump(mode="json")),
        "upcycle_sources": json.dumps(digests),
    }


def provenance(sources: Sources, plan: Plan, digests: list[str], calibration: Calibration | None) -> str:
    """The text of upcycle.json."""
    facts: dict[str, Any] = {
        "tool": "spes-mega upcycle",
        "version": __version__,
        "settings": plan.settings.model_dump(mode="json"),
        "sources": [
            {"name": checkpoint.source.resolve().name, "sha256": digest}
            for checkpoint, digest in zip(sources.all, digests, strict=True)
        ],
        "source_sha256_rule": DIGEST_RULE,
        "source_model": plan.source.model_dump(mode="json", exclude_defaults=True),
        "calibration": {"tokens": calibration.tokens, "sha256": calibration.sha256} if calibration else None,
        "result": plan.summary() | {"differs_from_source": plan.difference()},
    }
    return json.dumps(facts, indent=2) + "\n"


def starting_recipe(plan: Plan) -> str:
    """The text of a recipe for the result: its model, how it was made, and defaults for all the rest."""
    raw = {
        "name": plan.model.family,
        "model": plan.model.model_dump(mode="json", exclude_defaults=True),
        "upcycle": plan.settings.model_dump(mode="json"),
    }
    train = TrainSection()
    raw["spes"] = {"num_nodes": 2, "sync_every": SpesSection().sync_every}
    raw["train"] = {
        "steps": train.steps,
        "seq_len": min(train.seq_len, plan.model.max_seq_len),
        "micro_batch_size": train.micro_batch_size,
        "lr": train.lr,
    }
    Recipe.model_validate(raw)
    return _RECIPE_HEADER + yaml.safe_dump(raw, sort_keys=False)
