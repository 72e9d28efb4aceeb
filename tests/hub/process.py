"""The real `spes-mega hub`, as a process of its own."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import yaml

from spes_mega.client.client import HubClient
from spes_mega.security.access import Access
from tests.hub.fabricated import make_recipe

TOKEN = "a-token-for-tests"


class HubProcess:
    def __init__(self, folder, raw, *options, port=0, open_files=None):
        """`open_files` are its limits of them, soft and hard."""
        self.recipe = make_recipe(raw.get("model"), raw.get("train"), **raw.get("spes", {}))
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(raw))
        arguments = ["hub", path, "--state", folder / "state", "--listen", f"127.0.0.1:{port}", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spes_mega.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"SPES_MEGA_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
            preexec_fn=open_files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, open_files)),
        )
        self.output = ""
        self.address = self.read_until("hub listening on ").split()[-1]

    def read_until(self, start):
        for line in self.process.stdout:
            self.output += line
            if line.startswith(start):
                return line
        raise AssertionError(f"the hub ended without a line {start!r}:\n{self.output}")

    def end(self, timeout=30):
        self.output += self.process.communicate(timeout=timeout)[0]
        return self.process.returncode

    def kill(self):
        self.process.kill()
        self.end()

    def peak_rss(self):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def open_files(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def client(self, node):
        return HubClient.for_recipe(self.recipe, self.address, node, access=Access(TOKEN))
