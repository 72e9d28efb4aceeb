from pathlib import Path

import pytest
import yaml

from spes_mega.recipe import Recipe, load_recipe, parse_recipe
from spes_mega.tools.recipe import explain_recipe

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_sections_in_sections_are_printed_and_read_back():
    wire = {"up": {"shared": "bf16", "experts": "int8"}, "down": "bf16"}
    outer = {"shared": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}}
    raw = yaml.safe_load(CONFIGS[0].read_text())
    recipe = parse_recipe(raw | {"spes": {"wire": wire, "outer": outer}}, source="test", base=Path("/"))
    assert parse_recipe(yaml.safe_load(explain_recipe(recipe)), source="printed", base=Path("/")) == recipe


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_is_printed_is_the_same_recipe(path):
    recipe = load_recipe(path)
    raw = yaml.safe_load(explain_recipe(recipe))
    assert parse_recipe(raw, source="printed", base=Path("/")) == recipe


def test_every_field_stands_there_with_its_default():
    text = explain_recipe(None)
    assert "  num_layers: ..." in text
    assert "  sync_every: 100                 # local steps between two synchronizations (H)" in text
    assert "# (local) rounds between two snapshot directories" in text
    assert "    up:  # In what precision" in text
    assert "      experts: fp32               # int8 has one scale a row" in text
    for name in [
        f for s in ("spes", "train", "data", "upcycle") for f in Recipe.model_fields[s].annotation.model_fields
    ]:
        assert f"  {name}: " in text
