"""The recipe: one YAML file that describes a run.

Every default lives here, once. Commands generate their flags from these sections (`options.py`),
and any field can be set from the command line by `--set section.field=value`, or by an overlay: a file with some keys.
Fields marked *local* may differ from node to node; all others are part of `Recipe.digest()`, on which
hub and nodes must agree.
"""

from spes_mega.recipe.data import CheckpointSection, DataSection
from spes_mega.recipe.model import MIXED_FAMILIES, MOE_FAMILIES, ModelSection
from spes_mega.recipe.outer import CodecName, CodecPair, OuterOptimizer, OuterSection, WireSection
from spes_mega.recipe.read import load_recipe, override_recipe, parse_recipe
from spes_mega.recipe.schema import Recipe, is_local
from spes_mega.recipe.section import Section
from spes_mega.recipe.spes import SpesSection
from spes_mega.recipe.train import TrainSection
from spes_mega.recipe.upcycle import UpcycleSection

__all__ = [
    "MIXED_FAMILIES",
    "MOE_FAMILIES",
    "CheckpointSection",
    "CodecName",
    "CodecPair",
    "DataSection",
    "ModelSection",
    "OuterOptimizer",
    "OuterSection",
    "Recipe",
    "Section",
    "SpesSection",
    "TrainSection",
    "UpcycleSection",
    "WireSection",
    "is_local",
    "load_recipe",
    "override_recipe",
    "parse_recipe",
]
