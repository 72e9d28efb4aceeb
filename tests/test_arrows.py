"""Arrows between the rooms point one way: a room imports only rooms on lower floors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND_FILES = (
    "errors", "internals", "crash_report", "output", "quoting", "signals", "progress", "sizes", "validation",
)  # fmt: skip
GROUND = {*GROUND_FILES, "files", "__version__"}
BELOW = GROUND | {"recipe", "options", "overlays"}
AT_REST = BELOW | {"layout", "data"}
ALLOWED = {
    "files": GROUND,
    "recipe": GROUND | {"outer"},  # which imports nothing: the recipe names the ownership that it gives
    "outer": set(),
    "layout": BELOW,
    "data": BELOW | {"layout", "model"},
    "model": BELOW | {"layout"},
    "wire": BELOW | {"layout", "outer"},
    "security": BELOW | {"wire"},
    "client": AT_REST | {"outer", "wire", "security"},
    "hub": AT_REST | {"outer", "wire", "security"},
    "node": AT_REST | {"outer", "model", "wire", "security", "client"},
    "evaluation": AT_REST | {"model"},
    "tools": AT_REST | {"outer", "model", "wire", "security", "client"},
    "upcycle": AT_REST,
}
"""What each room may import. Rooms that are missing on the right of all others are started by `cli` alone."""
FOLDERS = {room: ROOT / ("upcycle" if room == "upcycle" else f"spes_mega/{room}") for room in ALLOWED}


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
            elif parts[0] == "spes_mega" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    files = [f for f in FOLDERS[room].rglob("*.py") if "_pb2" not in f.name]
    assert files
    for file in files:
        extra = imported_rooms(file) - ALLOWED[room] - {room}
        assert not extra, f"{file.relative_to(ROOT)} imports {sorted(extra)}"


def test_every_room_has_its_arrows():
    rooms = {folder.name for folder in (ROOT / "spes_mega").iterdir() if (folder / "__init__.py").exists()}
    assert rooms | {"upcycle"} == set(ALLOWED)


def test_what_lies_below_the_rooms_imports_none_of_them():
    rooms = set(ALLOWED) - {"files", "recipe"}
    for name in GROUND_FILES:
        assert not imported_rooms(ROOT / f"spes_mega/{name}.py") & (rooms | {"recipe"}), name
    for name in ("options", "overlays"):
        assert not imported_rooms(ROOT / f"spes_mega/{name}.py") & rooms, name
