"""What hub and nodes of a run have to agree on, and what a run that was begun by an earlier version agreed on.

All is JSON: nested mappings of a recipe's fields, as `Recipe.agreed` gives them.
"""

import copy
import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

Agreed = dict[str, Any]

MEANING = "meaning"
"""Section for fields whose value an earlier version took in another sense."""
BALANCE = "train.aux_loss_coeff"
MEAN, SUM = "weight of the mean over MoE layers", "weight of the sum over MoE layers"
CHANGEABLE = (BALANCE,)
"""Fields that `--change` may name: a run goes on with another meaning of them."""
_ADDED_LATER: tuple[tuple[str, str, Any], ...] = (
    ("model", "init", "scaled"),
    ("train", "warmup_from", 0.0),
    ("train", "decay_norms", False),
    ("train", "aux_loss_warmup", 0.0),
)
"""Fields, each with what versions did that did not have it."""
_MEANT = f"{MEANING}."


class Difference(NamedTuple):
    """What a field is on both sides, as JSON ("nothing" where one has none), and whether it is meant differently."""

    its: str
    own: str
    meaning: bool

    def and_of(self, other: "Difference") -> "Difference":
        return Difference(f"{self.its}, {other.its}", f"{self.own}, {other.own}", other.meaning)


def meanings(agreed: Agreed, balance: str = MEAN) -> Agreed:
    """Return the section that says how fields are meant, of those that this model has a use for."""
    model = agreed["model"]
    moe_layers = model["num_layers"] - len(set(model["dense_layers"])) if model["num_experts"] else 0
    return {BALANCE: balance} if moe_layers > 1 and agreed["train"]["aux_loss_coeff"] else {}


def in_todays_terms(agreed: Agreed) -> Agreed:
    """Return what an earlier version agreed on, with the fields and meanings that are written down today."""
    if MEANING in agreed:
        return agreed
    today = copy.deepcopy(agreed)
    try:
        for section, field, value in _ADDED_LATER:
            today[section].setdefault(field, value)
        today[MEANING] = meanings(today, balance=SUM)
    except (KeyError, TypeError, AttributeError):  # of no version
        return agreed
    return today


def differences(theirs: Agreed, mine: Agreed) -> dict[str, Difference]:
    """Return the fields that differ, in value or in meaning."""
    found: dict[str, Difference] = {}
    for field, difference in _differences(in_todays_terms(theirs), mine, ""):
        name = field.removeprefix(_MEANT)
        if name not in found:
            found[name] = difference
        elif difference.meaning:
            found[name] = found[name].and_of(difference)
    return found


def _differences(theirs: Agreed, mine: Agreed, path: str) -> Iterator[tuple[str, Difference]]:
    for key in theirs | mine:
        its, own = theirs.get(key, ...), mine.get(key, ...)
        if isinstance(its, dict) and isinstance(own, dict):
            yield from _differences(its, own, f"{path}{key}.")
        elif _text(its) != _text(own):
            meaning = path == _MEANT and its is not ... and own is not ...
            yield f"{path}{key}", Difference(_text(its), _text(own), meaning)


def _text(value: Any) -> str:
    return "nothing" if value is ... else json.dumps(value)


def may_go_on(found: dict[str, Difference], change: Collection[str]) -> bool:
    """Whether all that differs are fields in `change` that had another meaning; their values may differ, too."""
    return all(difference.meaning and field in change for field, difference in found.items())


def told(found: dict[str, Difference], holder: str) -> str:
    """Return the differences in words; the `holder` has the other recipe. Says what `--change` could help with."""
    text = "; ".join(f"{field}: {its} in the {holder}, {own} in the recipe" for field, (its, own, _) in found.items())
    if found and may_go_on(found, CHANGEABLE):
        flags = " ".join(f"--change {field}" for field in found)
        text += f"; to go on with what is meant today, give {flags} to the hub and to its nodes"
    return text
