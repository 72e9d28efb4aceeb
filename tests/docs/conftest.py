"""The fixtures of tests/upcycle, for the commands of the page about it."""

from tests.upcycle.conftest import make_dense

__all__ = ["make_dense"]
