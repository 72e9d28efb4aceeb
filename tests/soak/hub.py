"""The hub of a soak test: a real process that is killed and started again."""

import threading

from spes_mega.node.launch.command import free_port
from tests.hub.fabricated import read_state
from tests.hub.process import HubProcess

DEADLINE = 7
SETTLED_ROUNDS = 10


class SoakHub:
    def __init__(self, folder, raw):
        self._folder, self._raw, self._port = folder, raw, free_port()
        self.lives, self.output = 0, ""
        self._samples = []
        self._start()
        self.address = f"127.0.0.1:{self._port}"
        self.initial = read_state(folder / "state/rounds/000000")

    def _start(self):
        self._hub = HubProcess(self._folder, self._raw, port=self._port)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.lives += 1
        self._samples.append([])

    def _read(self):
        for line in self._hub.process.stdout:
            self.output += line

    def restart(self):
        """SIGKILL, and a new one."""
        self._hub.process.kill()
        self._hub.process.wait()
        self._reader.join()
        self._start()

    def round(self):
        """The newest committed one. Also looks at the memory."""
        newest = max(int(path.name) for path in (self._folder / "state/rounds").glob("[0-9]*"))
        if self._hub.process.poll() is None:
            self._samples[-1].append((newest, self._rss()))
        elif self._hub.process.returncode == DEADLINE:  # too much failed at once: its operator starts it again
            self._reader.join()
            self._start()
        elif newest < self._raw["train"]["steps"] // 10:
            raise AssertionError(f"the hub ended with {self._hub.process.returncode}: {self.output[-1000:]}")
        return newest

    def _rss(self):
        with open(f"/proc/{self._hub.process.pid}/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4096

    def rss_figures(self):
        """Of the hub that lived longest: when it had closed some rounds, and in the end."""
        longest = max(self._samples, key=lambda samples: samples[-1][0] - samples[0][0] if samples else 0)
        settled = next((rss for round_, rss in longest if round_ >= longest[0][0] + SETTLED_ROUNDS), longest[-1][1])
        return settled, longest[-1][1]

    def end(self):
        self.returncode = self._hub.process.wait(120)
        self._reader.join()
        return self.returncode
