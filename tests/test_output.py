"""Commands whose output cannot be written, or not in the terminal's encoding; what nobody foresaw. Real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "spes_mega.cli"]
FAULT = """
import sys
from spes_mega import cli
from spes_mega.tools import recipe
def fail(*_): {statement}
recipe.explain_recipe = fail
cli.main(["recipe"])
"""


def run(*arguments, **options):
    return subprocess.run([*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, timeout=120, check=False, **options)


def fail_with(statement, **env):
    code = FAULT.format(statement=statement)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=os.environ | env
    )


def test_a_full_disk_behind_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        ended = run("recipe", stdout=full)
    assert ended.returncode == 1
    assert ended.stderr == b"error: standard output: cannot be written: No space left on device\n"


def test_a_reader_who_has_enough_ends_a_command_without_a_word():
    read, write = os.pipe()
    os.close(read)
    ended = run("recipe", stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_an_error_keeps_its_exit_code_where_it_cannot_be_said(tmp_path):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*COMMAND, "recipe", str(tmp_path / "missing")], stderr=full, timeout=120, check=False)
    assert ended.returncode == 3


@pytest.mark.parametrize("closed", ["<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_give_their_numbers_to_files(tmp_path, closed):
    """The numbers 0 to 2 would go to key files, and what is printed would end up in them."""
    out = tmp_path / "keys"
    words = " ".join([*COMMAND, "keys", "new", "--nodes", "1", "--host", "h", "--out", str(out)])
    ended = subprocess.run(["sh", "-c", f"exec {words} {closed}"], timeout=120, check=False)
    assert ended.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", (out / "node-0/token").read_text())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path, encoding):
    out = tmp_path / os.fsdecode(b"\xc3\xa4\xff\xe2\x82\xac")
    ended = run(
        *("keys", "new", "--nodes", 1, "--host", "h", "--out", out),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.decode(encoding).count("\\udcff") == 4  # a line each
    assert (out / "hub").is_dir()


def test_a_fault_of_ours_says_so_and_keeps_its_traceback_in_a_file(tmp_path):
    ended = fail_with("raise KeyError('nobody foresaw')", TMPDIR=str(tmp_path))
    assert ended.returncode == 1
    assert re.fullmatch(r"error: this is a fault of spes-mega \S+: KeyError: 'nobody foresaw'; .*\n", ended.stderr)
    (report,) = tmp_path.iterdir()
    assert str(report) in ended.stderr
    assert "Traceback" in report.read_text()
    assert "in fail" in report.read_text()


def test_a_fault_of_ours_shows_its_traceback_where_no_file_can_be_written():
    code = "import tempfile; tempfile.mkstemp = lambda **_: open('/dev/full/none'); raise KeyError('nobody foresaw')"
    ended = fail_with(code)
    assert ended.returncode == 1
    assert "this is a fault of spes-mega" in ended.stderr
    assert "Traceback" in ended.stderr


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("open('/nowhere/x')", "error: /nowhere/x: No such file or directory\n"),
        ("raise OSError(28, 'No space left on device')", "error: No space left on device\n"),
        ("raise MemoryError", "error: out of memory: no message\n"),
    ],
)
def test_what_the_system_refuses_is_no_fault_of_ours(tmp_path, statement, message):
    ended = fail_with(statement, TMPDIR=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, message)
    assert not list(tmp_path.iterdir())


def test_long_work_outlives_its_reader(tmp_path):
    code = (
        "from spes_mega.output import outlive_output, standard_streams\n"
        "with standard_streams():\n"
        "    outlive_output()\n"
        "    for _ in range(3): print('a line', flush=True)\n"
        f"    open({str(tmp_path / 'went on')!r}, 'w')\n"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert ended.returncode == 0
    assert ended.stderr == b"standard output cannot be written (Broken pipe); going on without it\n"
    assert Path(tmp_path / "went on").exists()
