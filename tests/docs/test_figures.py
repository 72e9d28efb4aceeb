"""Figures in documents that take too long to make anew: each page has them, and nothing that made them has changed.

docs/figures.yaml says which document has which figures, of which commit, and what made them. A digest is that of the
output of the code named, on input that is made here, or of a file. When a digest differs, run the command, put the new
figures into the document, and the commit and the digest that this test prints into docs/figures.yaml.
"""

import hashlib
from pathlib import Path

import pytest
import torch
import yaml

from spes_mega.recipe import load_recipe
from upcycle.methods.noise_draws import add_noise

ROOT = Path(__file__).parents[2]
ENTRIES = yaml.safe_load((ROOT / "docs/figures.yaml").read_text(encoding="utf-8"))


def noise_of_smollm2():
    """The noise that the example's recipe puts on a matrix of the size of SmolLM2's."""
    settings = load_recipe(ROOT / "examples/smollm2/recipe.yaml").upcycle
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    noise = add_noise(torch.zeros(1536, 576, dtype=torch.bfloat16), name, settings)
    # the last bit of a mean may be another one in another mathematical library
    return (noise.float() * 2**14).round().to(torch.int32).numpy().tobytes()


OUTPUTS = {"noise": noise_of_smollm2}


def digest_of(what):
    content = OUTPUTS[what]() if what in OUTPUTS else (ROOT / what).read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["command"])
def test_the_document_has_the_figures_and_names_their_commit(entry):
    text = (ROOT / entry["document"]).read_text(encoding="utf-8")
    assert [figure for figure in entry["figures"] if figure not in text] == []
    assert entry["commit"] in text


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["command"])
def test_what_made_the_figures_is_what_it_was(entry):
    assert {what: digest_of(what) for what in entry["made_by"]} == entry["made_by"]
