"""docs/benchmarks/published.md has the figures of benchmarks/published, and these are near the published ones."""

from pathlib import Path

import pytest

from benchmarks.published.run import figures, table

PAGE = (Path(__file__).parents[2] / "docs/benchmarks/published.md").read_text()


def test_the_page_has_the_table():
    assert "\n".join(table()) in PAGE


@pytest.mark.parametrize("figure", figures(), ids=lambda figure: figure.name)
def test_the_references_rules_give_the_published_figure(figure):
    assert figure.reference == pytest.approx(figure.published, rel=0.05)


def test_our_memory_is_not_above_the_references_and_our_bytes_are_fewer():
    by_name = {figure.name: figure for figure in figures()}
    memory = by_name["2B, memory of a GPU, SPES"]
    assert memory.ours < 0.9 * memory.reference
    saved = by_name["2B, bytes of a round, less than DiLoCo's"]
    assert saved.ours > saved.reference
