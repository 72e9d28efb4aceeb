"""What the deepspeed launcher starts for each rank: runs the rank as its child, and says how that ended.

Only a parent learns which signal killed a process, and DeepSpeed keeps that to itself. This process imports nothing
heavy and does no work, so that it outlives what may befall the rank.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

from spes_mega.node.launch.reports import tell
from spes_mega.node.stop import STOP_GRACE_S, stop_without_launcher

RANK_ENVIRONMENT = "SPES_MEGA_RANK_ENVIRONMENT"
"""Variables of the rank that the deepspeed launcher must not see, as a JSON object; null: not set."""


def main() -> None:
    """Run the rank with the arguments of this process, and end as it did."""
    if not tell(processes=[os.getppid(), os.getpid()], ranks=int(os.environ["LOCAL_SIZE"])):
        sys.exit(128 + signal.SIGTERM)  # `spes-mega launch` is gone, and with it the node
    command = [sys.executable, "-u", "-m", "spes_mega.node.main", *sys.argv[1:]]
    with subprocess.Popen(command, env=_environment()) as rank:
        _pass_on_signals(rank)
        stop_without_launcher()
        tell(processes=[rank.pid])
        status = rank.wait()
    tell(status=status)
    sys.exit(status if status >= 0 else 128 - status)


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    own: dict[str, str | None] = json.loads(env.pop(RANK_ENVIRONMENT, "{}"))
    rest = {name: value for name, value in env.items() if name not in own}
    return rest | {name: value for name, value in own.items() if value is not None}


def _pass_on_signals(rank: subprocess.Popen[bytes]) -> None:
    """Pass stop signals on to the rank, which is killed if that does not end it: it may hang in native code."""
    asked = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        rank.send_signal(signal.SIGTERM)
        if not asked.is_set():
            asked.set()
            timer = threading.Timer(STOP_GRACE_S, rank.kill)
            timer.daemon = True
            timer.start()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)


if __name__ == "__main__":
    main()
