"""Arrows between the rooms point one way: a room imports only rooms on lower floors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {
    "recipe",
    "agreement",
    "validation",
    "errors",
    "crash_report",
    "output",
    "quoting",
    "signals",
    "git_lfs",
    "text_files",
    "strict_yaml",
    "",
}
ALLOWED = {
    "layout": GROUND,
    "outer": set(),
    "model": GROUND | {"layout"},
    "hub": GROUND | {"layout", "outer", "options"},
    "node": GROUND
    | {"layout", "outer", "model", "hub.client", "hub.access", "deepspeed_config", "options", "overlays", "progress"},
    "tools": GROUND
    | {"layout", "outer", "model", "hub.access", "hub.address", "hub.keys", "hub.sizes", "hub.status"}
    | {"deepspeed_config", "options", "progress"},
    "upcycle": GROUND | {"layout", "options", "progress"},
}


def room_of_callers(parts: list[str]) -> bool:
    """Whether a module of the hub is for those who call it, too."""
    return len(parts) > 2 and parts[2] in {"client", "access", "address", "keys", "sizes", "status"}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for item in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"{path}: relative import"
            names = [f"{item.module}.{alias.name}" for alias in item.names]
        elif isinstance(item, ast.Import):
            names = [alias.name for alias in item.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "upcycle":
                rooms.add("upcycle")
            elif parts[:2] == ["spes_mega", "hub"] and room_of_callers(parts):
                rooms.add(f"hub.{parts[2]}")
            elif parts[0] == "spes_mega" and len(parts) > 1:
                rooms.add("" if parts[1].startswith("__") else parts[1])
    return rooms


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    folder = ROOT / "upcycle" if room == "upcycle" else ROOT / "spes_mega" / room
    files = [f for f in folder.rglob("*.py") if "_pb2" not in f.name]
    assert files
    for file in files:
        extra = {found for found in imported_rooms(file) - ALLOWED[room] if found.partition(".")[0] != room}
        assert not extra, f"{file.relative_to(ROOT)} imports {sorted(extra)}"
