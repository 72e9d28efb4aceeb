"""The fixtures of tests/hub, for tests against a running hub."""

from tests.hub.conftest import _short_waits, connect, start_hub, start_process

__all__ = ["_short_waits", "connect", "start_hub", "start_process"]
