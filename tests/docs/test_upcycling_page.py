"""Every upcycling command of docs/guides/upcycle.md and of `--help` runs, on tiny models of the same names."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from megatron.core.datasets import indexed_dataset

from spes_mega.layout import open_checkpoint
from upcycle.command import command

PAGE = Path(__file__).parents[2] / "docs/guides/upcycle.md"
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("spes-mega upcycle")
]
EXAMPLES = [line.strip() for line in (command.help or "").splitlines() if line.strip().startswith("spes-mega upcycle")]


@pytest.mark.parametrize("line", COMMANDS + EXAMPLES)
def test_the_command_runs(make_dense, tmp_path, monkeypatch, line):
    arguments = shlex.split(line)[2:]
    sources = [name for name in ("Qwen3-1.7B", "Llama-3.2-1B", "math", "code", "law", "news") if name in arguments]
    for name in sources:
        make_dense("llama" if name.startswith("Llama") else "qwen3", name=name, intermediate_size=96)
    (tmp_path / "data").mkdir()
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "data/text.bin"), dtype=np.uint16)
    builder.add_document(torch.arange(600) * 7 % 103, [600])
    builder.finalize(str(tmp_path / "data/text.idx"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments else f"{sources[0]}-moe"
    if "--dry-run" in arguments:
        assert not Path(out).exists()
        return
    with open_checkpoint(Path(out)) as moe:
        assert moe.model.is_moe
        found = f"{moe.model.num_experts} experts a layer, top-{moe.model.top_k}"
    assert found in done.output
    exact = ("copy" in arguments or "split" in arguments) and "bf16" not in arguments
    assert f"computes what its source does: {'yes' if exact else 'no: '}" in done.output


def test_there_are_commands_for_every_method_but_the_default():
    text = " ".join(COMMANDS)
    assert len(COMMANDS) >= 7
    assert len(EXAMPLES) == 3
    for method in ("copy", "drop", "split", "partition", "mix"):
        assert f"--method {method}" in text
