"""What can be seen to be wrong with a node's start before anything heavy is loaded."""

from spes_mega.errors import RecipeError
from spes_mega.recipe import Recipe


def check_node(recipe: Recipe, node: int, hub: str | None) -> None:
    """Raises RecipeError: there is no such node in the recipe, or the recipe needs a hub."""
    if not 0 <= node < recipe.spes.num_nodes:
        raise RecipeError(f"--node {node}: the recipe has nodes 0..{recipe.spes.num_nodes - 1} (spes.num_nodes)")
    if hub is None and recipe.spes.num_nodes > 1:
        raise RecipeError(f"spes.num_nodes is {recipe.spes.num_nodes}: give --hub, or --set spes.num_nodes=1")
    if hub is None and recipe.model.is_moe and recipe.spes.merge_steps:
        raise RecipeError("experts are merged by the hub: give --hub, or --set spes.merge_steps=0")
    if hub is None and not (recipe.spes.outer.shared.averages and recipe.spes.outer.experts.averages):
        raise RecipeError("the outer optimizer runs on the hub: give --hub, or --set spes.outer={}")
