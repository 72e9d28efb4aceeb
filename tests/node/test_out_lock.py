import os
import signal
import subprocess
import sys

import pytest

from spes_mega.errors import RecipeError
from spes_mega.node.out_lock import lock_out

HOLDER = """
import sys, time
from pathlib import Path
from spes_mega.node.out_lock import lock_out
lock_out(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_directory_is_free_again_when_the_process_that_used_it_was_killed(tmp_path):
    out = tmp_path / "runs/node-0"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, out], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RecipeError, match=f"--out {out}: another node is using this directory") as raised:
            lock_out(out)
        assert raised.value.exit_code == 3
        os.close(lock_out(tmp_path / "runs/node-1"))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    os.close(lock_out(out))
