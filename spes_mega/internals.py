"""Internals of other libraries: attributes that no documentation promises, and that a release may rename or drop.

What relies on them looks them up here, so that a release that lacks them ends in an error that names library, release
and attribute, or, where the library works without being patched, in one line that says so.
"""

import importlib
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spes_mega.errors import SpesError

_log = logging.getLogger("spes_mega")


class IncompatibleError(SpesError):
    """An installed library is not as the code that relies on its internals was written for."""


@dataclass(frozen=True)
class Library:
    """A library, and the releases that the code which relies on its internals was written against."""

    package: str
    releases: str

    def resolve(self, path: str) -> Any:
        """Return the object at a `module:attribute.attribute` path. Raises IncompatibleError."""
        name, _, attributes = path.partition(":")
        try:
            found: Any = importlib.import_module(name)
        except ImportError as e:
            raise self.error(f"there is no module {name}") from e
        for attribute in attributes.split("."):
            found = self.attribute(found, attribute)
        return found

    def attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object of the library. Raises IncompatibleError."""
        try:
            return getattr(owner, name)
        except AttributeError as e:
            raise self.error(f"{_name_of(owner)} has no attribute {name}") from e

    def check_parameters(self, function: Callable[..., Any], *expected: str) -> None:
        """Raise IncompatibleError unless the function's first parameters are called `expected`."""
        names = tuple(inspect.signature(function).parameters)
        if names[: len(expected)] != expected:
            raise self.error(f"{_name_of(function)} takes ({', '.join(names)}), not ({', '.join(expected)}, …)")

    def check_reads(self, function: Callable[..., Any], name: str) -> None:
        """Raise IncompatibleError unless the function's own code reads a global or an attribute called `name`."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or name not in code.co_names:
            raise self.error(f"{_name_of(function)} does not use {name}")

    def error(self, fault: str) -> IncompatibleError:
        """Return the error that tells a fault of the installed release."""
        return IncompatibleError(
            f"{self.package} {_installed(self.package)}: {fault}; spes-mega was written against {self.releases}: "
            f"install {self.package} {self.releases}"
        )


def optional_patch(consequence: str) -> Callable[[Callable[..., None]], Callable[..., bool]]:
    """Decorate a patch that the library works without: where it does not fit, it is left out, and rank 0 says so.

    The patch checks before it changes anything. The decorated function returns whether the patch was applied.
    """

    def decorate(patch: Callable[..., None]) -> Callable[..., bool]:
        @wraps(patch)
        def applied(*arguments: Any, **options: Any) -> bool:
            try:
                patch(*arguments, **options)
            except IncompatibleError as e:
                _say_once(f"warning: {e}; until then {consequence}")
                return False
            return True

        return applied

    return decorate


@cache
def _say_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning(text)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(which is not installed)"


def _name_of(thing: Any) -> str:
    own = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    return own if isinstance(own, str) else type(thing).__qualname__
