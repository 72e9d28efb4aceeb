"""Unit files, job and compose file: a linter where there is one, and their commands are ones that this version has."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from spes_mega import errors
from spes_mega.cli import group

LAUNCHERS = Path(__file__).parents[1] / "launchers"
UNITS = sorted((LAUNCHERS / "systemd").glob("*.service"))
SCRIPTS = sorted([*LAUNCHERS.glob("*.sh"), LAUNCHERS / "slurm.sbatch", Path(__file__).parent / "te/install.sh"])
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SpesError)]
FINAL = {2} | {kind.exit_code for kind in KINDS} - {1, errors.DeadlineError.exit_code}
"""Exit codes of what starting again cannot mend (docs/reference/exit-codes.md)."""
STOPPED = {130, 143}
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))


def check_command(arguments):
    """Raises click's error if the command line interface does not take these arguments."""
    if "--init" in arguments:  # has to exist
        at = arguments.index("--init")
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    name, *rest = arguments
    command = group.get_command(None, name)
    with click.Context(command, info_name=name) as ctx:
        while isinstance(command, click.Group):
            command = command.get_command(ctx, rest.pop(0))
        command.make_context(name, rest)


def settings(unit):
    parser = configparser.RawConfigParser(strict=False, delimiters=["="], comment_prefixes=["#"])
    parser.optionxform = str
    parser.read(unit)
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_a_command_that_exists(unit):
    service = settings(unit)
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == "/opt/spes-mega/.venv/bin/spes-mega"
    values = {"${NODE}": "0", "${HUB}": "h:1", "${LISTEN}": "0.0.0.0:1", "${DATA}": "d"}
    check_command([values.get(a, a.replace("%i", "run")) for a in arguments if not a.endswith("_OPTIONS")])
    assert set(map(int, service["RestartPreventExitStatus"].split())) - STOPPED == FINAL
    assert service["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_to_complain_about(unit, tmp_path):
    instance = tmp_path / unit.name.replace("@", "@run")
    instance.write_text(unit.read_text().replace("/opt/spes-mega/.venv/bin/spes-mega", "/bin/true"))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", instance], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_script_for_a_node_gives_up_at_the_same_codes():
    (codes,) = re.findall(r"^ *([0-9 |]+)\) exit", (LAUNCHERS / "node.sh").read_text(), re.M)
    assert set(map(int, codes.split("|"))) == {0} | FINAL | STOPPED


def test_the_page_on_exit_codes_says_at_which_nothing_is_started_again():
    text = (LAUNCHERS.parent / "docs/reference/exit-codes.md").read_text()
    (again, final) = re.findall(r"restart after (.*?) and 128 \+ N, but not after (.*?)\.", text, re.S)[0]
    first, last, *others = map(int, re.findall(r"\d+", final))
    assert {*range(first, last + 1), *others} == FINAL | STOPPED
    assert set(map(int, re.findall(r"\d+", again))) == {1, errors.DeadlineError.exit_code}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing_to_complain_about(script):
    result = subprocess.run([SHELLCHECK, "--severity=warning", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_slurm_job_makes_keys_once_and_starts_a_hub_and_a_node_on_each_machine(tmp_path):
    """A dry run: Slurm's own programs are stand-ins that start, or note, what they are given."""
    programs = {
        "scontrol": "echo a1; echo a2",
        "spes-mega": f'echo "$@" >> {tmp_path}/calls; if [ "$1" = keys ]; then mkdir -p "${{@: -1}}"; fi',
        # options of srun end where its command begins; one task, or one for each machine
        "srun": 'tasks=2; while [ "${1#-}" != "$1" ]; do '
        "case $1 in --nodes) tasks=1; shift 2;; --overlap|--*=*) shift;;"
        ' *) shift 2;; esac; done; for ((k = 0; k < tasks; k++)); do SLURM_PROCID=$k "$@"; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    for _ in range(2):
        subprocess.run([LAUNCHERS / "slurm.sbatch", "r.yaml", tmp_path / "out", "d", "i"], env=env, check=True)
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[0] for call in calls].count("keys") == 1
    for call in calls:
        check_command(call)
    assert calls[0] == ["keys", "new", "--nodes", "2", "--host", "a1,a2", "--out", f"{tmp_path}/out/keys"]
    nodes = [call for call in calls if call[0] == "launch"]
    assert sorted(call[call.index("--node") + 1] for call in nodes) == ["0", "0", "1", "1"]
    for call in nodes:
        node = call[call.index("--node") + 1]
        assert call[call.index("--keys") + 1] == f"{tmp_path}/out/keys/node-{node}"
        assert call[call.index("--hub") + 1] == "a1:7070"


def test_the_compose_file_starts_commands_that_exist_and_shares_what_they_name():
    compose = yaml.safe_load((LAUNCHERS / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"keys", "hub", "node-0", "node-1"}
    for name, service in services.items():
        check_command(service["command"])
        assert service["image"] == "spes-mega"
        assert name == "keys" or re.fullmatch(r"on-failure:\d+", service["restart"])  # it restarts at any exit code
        mounted = [volume.rpartition(":")[2] for volume in service["volumes"]]
        for part in service["command"]:
            assert not part.startswith("/") or any(part.startswith(f"{folder}/") for folder in mounted), (name, part)
        for needed in service.get("depends_on", {}):
            assert services[needed]["healthcheck"]
    check_command(services["hub"]["healthcheck"]["test"][2:])
    context = LAUNCHERS / services["hub"]["build"]["context"]
    assert (context / services["hub"]["build"]["dockerfile"]).is_file()
    assert (context / "setup.cfg").is_file()


GUIDES = [f"docs/guides/{name}.md" for name in ("one-machine", "several-machines", "internet")]


@pytest.mark.parametrize("page", ["docs/operations.md", "docs/security.md", *GUIDES])
def test_commands_of_the_pages_on_running_it_exist(page):
    text = (LAUNCHERS.parent / page).read_text().replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    lines = [shlex.split(line, comments=True) for line in map(str.strip, blocks.splitlines())]
    commands = [arguments for program, *arguments in filter(None, lines) if program == "spes-mega"]
    checked = [arguments for arguments in commands if arguments[0] in ("keys", "hub", "launch", "status")]
    assert checked
    for arguments in checked:
        check_command(arguments)


def test_the_image_copies_what_it_installs():
    text = (LAUNCHERS / "Dockerfile").read_text()
    assert re.findall(r"^([A-Z]+) ", text, re.M) == ["FROM", "RUN", "COPY", "RUN", "ENV", "ENTRYPOINT"]
    assert "pip install --no-cache-dir -c /src/constraints.txt /src" in text
