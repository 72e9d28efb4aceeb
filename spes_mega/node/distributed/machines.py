"""The machines of a node: what their ranks must have in common, since no file system is shared between them."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spes_mega.errors import DataError, RecipeError, SpesError
from spes_mega.node.distributed.lifelines import connect
from spes_mega.node.distributed.place import Place
from spes_mega.node.options import NodeOptions
from spes_mega.node.stop import StopRequest
from spes_mega.recipe import Recipe

PACKAGES = ("spes-mega", "torch", "deepspeed", "megatron-core", "transformer-engine", "numpy")
Facts = dict[str, Any]


@contextmanager
def one_node(recipe: Recipe, options: NodeOptions, place: Place, ranks: Any, stop: StopRequest) -> Iterator[None]:
    """Be one node on several machines within the block, if there are several; all ranks take part.

    The machines are compared, and watch each other. Raises SpesError, on all ranks: they differ, or one was lost.
    """
    everyone = ranks.everyone(lambda: facts_of(recipe, options, place, ranks.device.type))
    if len({(facts["host"], facts["machine"]) for facts in everyone}) == 1:
        yield  # `spes-mega launch` sees all of them
        return
    ranks.where = place.host
    ranks.first(lambda: compare(everyone))
    with connect(place, [facts["host"] for facts in everyone], stop, ranks):
        yield


def facts_of(recipe: Recipe, options: NodeOptions, place: Place, device: str) -> Facts:
    """What ranks on other machines compare with theirs, before anything is built: values of JSON."""
    own = recipe.model_dump(mode="json", exclude={"data": {"train"}})  # where data lies is each machine's own affair
    return {
        "host": place.host,
        "machine": place.machine,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "device": device,
        "options": {
            "--node": options.node,
            "--hub": options.hub is not None,
            "--init": options.init is not None,
        },
        "recipe": {"digest": recipe.digest(), "fields": own},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def compare(everyone: Sequence[Facts]) -> None:
    """Raise SpesError, or RecipeError, for the first rank whose facts differ from rank 0's; names both machines."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for part, kind, cure in (
            ("versions", SpesError, "install the same packages on all machines of a node"),
            ("device", SpesError, "all ranks of a node train on devices of one kind"),
            ("options", RecipeError, "start all ranks of a node with the same options"),
            ("recipe", RecipeError, "give all machines of a node the same recipe, overlays and --set"),
        ):
            if lines := list(_differences(part, first[part], other[part])):
                raise kind(f"{names(first['host'], other['host'], rank)} differ: {'; '.join(lines)}: {cure}")


def compare_data(everyone: Sequence[tuple[str, Facts, str] | None]) -> None:
    """Raise DataError for the first rank whose training data are not rank 0's; names both machines.

    Of each rank the name of its machine, the identity of the data, and a description; None of one that has not looked.
    """
    assert everyone[0] is not None, "rank 0 has looked"
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other is not None and other[1] != first[1]:
            raise DataError(
                f"{names(first[0], other[0], rank)} have different training data: {first[2]}; and {other[2]}: copy "
                ".bin and .idx of one to the other; each machine's --data, or data.train, says where they lie"
            )


def names(first: str, other: str, rank: int) -> str:
    """Both ends of a difference."""
    return f"{first} (rank 0) and {other} (rank {rank})"


def _differences(path: str, first: Any, other: Any) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(other, dict):
        for key in first | other:
            yield from _differences(f"{path}.{key}", first.get(key), other.get(key))
    elif first != other:
        yield f"{path.removeprefix('recipe.fields.').removeprefix('options.')} {_shown(first)} and {_shown(other)}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)[:40]
