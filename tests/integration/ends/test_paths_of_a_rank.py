"""Every path of a running node, bad in every way that it can be: one line with the path, and the exit code.

Ranks are started as torchrun would start them, one for each case, forked from a process that has imported everything.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_bad_paths import KINDS, directory, linked, made

FORKER = """
import json, os, sys
from spes_mega.client import client
from spes_mega.node import main, metrics, trainer
from spes_mega.node.checkpoint import resume
from spes_mega.node.distributed import process_group, ranks
from spes_mega.node.sync import hub_node, lone_node
from spes_mega.node.zero import engine
from spes_mega.node.launch.command import free_port
for case in json.load(sys.stdin):
    os.environ["MASTER_PORT"] = str(free_port())
    if (child := os.fork()) == 0:
        told = os.open(case["told"], os.O_WRONLY | os.O_CREAT)
        os.dup2(told, 1), os.dup2(told, 2)
        os.environ["TMPDIR"] = case["tmp"]
        sys.argv[1:] = case["arguments"]
        if case["fault"]:
            def broken(*_):
                raise ValueError("nobody foresaw this\\nor that")
            setattr(*{"in find": (resume, "find_checkpoint"), "in train": (main, "train")}[case["fault"]], broken)
        code = 70
        try:
            main.main()
            code = 0
        except SystemExit as e:
            code = e.code
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

# what is bad, and how it comes to be so at a path; the path is what has to be named
OF_OUT = {
    f"{name} {kind}": (name, kind)
    for name in ("metrics.jsonl", "checkpoints", "final", "lock")
    for kind in ("directory", "loop", "dangling", "empty file", "socket")
    if (name, kind) not in {
        ("metrics.jsonl", "empty file"), ("lock", "empty file"), ("lock", "dangling"),
        ("checkpoints", "directory"),
    }
}  # fmt: skip
OUT = ("long", "very long", "loop", "below a loop", "below a file", "dangling", "below a dangling link", "empty file")
INIT = RESUME = tuple(KINDS)
CASES = {
    **{f"--out {kind}": ("--out {}", kind) for kind in OUT if kind != "below a dangling link"},
    **{f"--init {kind}": ("--out {place}/out --init {}", kind) for kind in INIT},
    **{f"--resume {kind}": ("--out {place}/out --resume {}", kind) for kind in RESUME},
    **{f"OUT/{name}": (f"--out {{place}}/out {at}", kind) for name, (at, kind) in OF_OUT.items()},
}
PRIVATE = {
    "--out private": "--out {}/out",
    "--init private": "--out {place}/out --init {}/init",
    "--resume private": "--out {place}/out --resume {}/checkpoint",
}


def put(path: Path, kind: str, place: Path) -> Path:
    """Make something bad at a path."""
    path.parent.mkdir(exist_ok=True)
    made_there: dict[str, Callable[[Path], Path]] = {
        "directory": directory,
        "loop": lambda path: linked(path, path),
        "dangling": lambda path: linked(path, place / "no" / "where"),
        "empty file": made,
    }
    return made_there[kind](path) if kind in made_there else KINDS[kind](path.parent).rename(path)


def case(arguments, root, place, recipe, fault=""):
    return {
        "arguments": [str(recipe), *arguments],
        "told": str(root / f"{place.name}.txt"),
        "tmp": str(place),
        "fault": fault,
    }


def prepared(template, kind, root, place, recipe):
    """A case, and the path that has to be named."""
    *options, last = template.split()
    if kind in KINDS and last != "{}":  # something in OUT
        path = put(place / "out" / last, kind, place)
        return case([part.format(place=place) for part in options], root, place, recipe), path
    path = KINDS[kind](place)
    return case(
        [part.replace("{}", str(path)).format(place=place) for part in (*options, last)], root, place, recipe
    ), path


@pytest.fixture(scope="module")
def told(tmp_path_factory, write_recipe):
    """What each rank said, its exit code, and the path in question."""
    recipe = write_recipe(tmp_path_factory.mktemp("recipe"), train={"steps": 2})
    with tempfile.TemporaryDirectory(prefix="spes-") as name:
        root = Path(name)
        cases, paths = {}, {}
        for number, (key, (template, kind)) in enumerate(CASES.items()):
            (place := root / str(number)).mkdir()
            cases[key], paths[key] = prepared(template, kind, root, place, recipe)
        for key, template in PRIVATE.items() if os.geteuid() else ():
            (place := root / key.replace(" ", "-")).mkdir()
            paths[key] = directory(place / "private")
            paths[key].chmod(0)
            arguments = [part.replace("{}", str(paths[key])).format(place=place) for part in template.split()]
            cases[key] = case(arguments, root, place, recipe)
        for fault in ("in find", "in train"):
            (place := root / fault.replace(" ", "-")).mkdir()
            cases[fault], paths[fault] = case(["--out", str(place / "out")], root, place, recipe, fault), place
        ended = subprocess.run(
            [sys.executable, "-c", FORKER],
            input=json.dumps(list(cases.values())),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | RANK,
            check=True,
            timeout=800,
        )
        codes = dict(zip(cases, map(int, ended.stdout.split()), strict=True))
        yield {key: (Path(cases[key]["told"]).read_text(), codes[key], paths[key]) for key in cases}
        for key in PRIVATE if os.geteuid() else ():
            paths[key].chmod(0o700)


@pytest.mark.parametrize("name", [*CASES, *PRIVATE])
def test_a_bad_path_is_told_in_one_line(told, name):
    if name not in told:
        pytest.skip("root may enter every folder; the same errors come from the other kinds of paths")
    text, code, path = told[name]
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    assert text.splitlines()[-1] == lines[0]
    shown = str(path).encode(errors="backslashreplace").decode()
    assert shown in lines[0] or str(path).encode(errors="replace").decode().replace("?", "\ufffd") in lines[0], lines
    assert code == 4, lines


@pytest.mark.parametrize("name", ["in find", "in train"])
def test_what_nobody_foresaw_is_reported_as_the_commands_do(told, name):
    text, code, place = told[name]
    assert code == 1
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    said = (
        r"error: this is a fault of spes-mega \S+: ValueError: nobody foresaw this \(rank 0\); please report it with "
    )
    report = Path(re.match(said + r"(\S+), which has the traceback", line)[1])
    assert report.parent == place
    assert report.read_text().rstrip().endswith("ValueError: nobody foresaw this\nor that")
