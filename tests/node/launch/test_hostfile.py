"""Hostfiles, and the command lines of a node of several machines."""

import subprocess

import click
import pytest

from spes_mega.errors import RecipeError
from spes_mega.node.launch.hostfile import Cluster, for_pdsh, read_hostfile

NONE = {
    "hostfile": None, "no_ssh": False, "node_rank": None, "launcher": "pdsh", "launcher_args": "", "master_addr": None,
    "ranks": None,
}  # fmt: skip


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=8\nb   slots=8  # the new one\n")
    return path


def test_a_hostfile_gives_machines_and_ranks_in_its_order(hostfile):
    assert list(read_hostfile(hostfile).items()) == [("a", 8), ("b", 8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=1\nb", ":2: expected NAME slots=N"),
        ("a slots=0", ":1: expected"),
        ("a slots=1\na slots=2", ":2: a stands there twice"),
        ("# none\n", "names no machine"),
    ],
)
def test_a_malformed_hostfile_is_refused_with_its_line(hostfile, text, said):
    hostfile.write_text(text)
    with pytest.raises(RecipeError, match=said):
        read_hostfile(hostfile)


def test_a_missing_hostfile_is_named(tmp_path):
    with pytest.raises(RecipeError, match="hosts: cannot read the hostfile: No such file"):
        read_hostfile(tmp_path / "hosts")


def test_each_machine_by_itself(hostfile):
    cluster = Cluster.of(NONE | {"hostfile": hostfile, "no_ssh": True, "node_rank": 1})
    assert not cluster.leads
    assert cluster.launcher_arguments(7) == [
        f"--hostfile={hostfile}", "--master_addr=a", "--master_port=7", "--no_ssh", "--node_rank=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"no_ssh": True}, {"node_rank": 0}, {"master_addr": "a"}],
)
def test_options_of_a_cluster_without_hostfile_are_refused(options):
    with pytest.raises(click.UsageError, match="--hostfile"):
        Cluster.of(NONE | options)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"no_ssh": True}, "needs --node_rank, from 0 to 1"), ({"no_ssh": True, "node_rank": 2}, "from 0 to 1"),
     ({"ranks": 2}, "--ranks contradicts"), ({"node_rank": 0}, "is for --no_ssh")],
)  # fmt: skip
def test_contradictions_are_refused(hostfile, options, said):
    with pytest.raises(click.UsageError, match=said):
        Cluster.of(NONE | {"hostfile": hostfile} | options)


@pytest.mark.parametrize(
    "text", ["plain", "{}", 'data.train="/a b"', "it's $HOME", "50%n", "a`b` \\ c", "* ;&|", "a\tb"]
)
def test_arguments_come_through_pdsh_as_they_are(text):
    from types import SimpleNamespace

    from deepspeed.launcher.multinode_runner import PDSHRunner

    args = SimpleNamespace(user_args=[for_pdsh(text)], user_script="x")
    (argument,) = PDSHRunner.parse_user_args(SimpleNamespace(args=args))
    there = subprocess.run(["sh", "-c", f"printf %s {argument}"], capture_output=True, text=True, check=True)
    assert there.stdout.replace("%%", "%") == text
