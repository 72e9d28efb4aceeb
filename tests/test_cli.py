import subprocess
import sys

import pytest

from spes_mega.cli import COMMANDS, group, main
from spes_mega.errors import CheckpointError

HEAVY = ("torch", "megatron", "deepspeed", "grpc", "numpy", "pydantic", "transformers", "rich")


@pytest.mark.parametrize(("command", "needed"), [("", []), ("status", ["grpc"]), ("keys", [])])
def test_what_has_to_answer_at_once_imports_nothing_heavy(command, needed):
    code = (
        "import sys\n"
        "from spes_mega.cli import main\n"
        f"try:\n    main([*{command.split()!r}, '--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"HEAVY {needed}" in result.stdout
    if not command:
        assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    assert e.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_errors_for_the_user_have_a_message_and_an_exit_code(monkeypatch, capsys):
    def fail(**_):
        raise CheckpointError("x.safetensors: truncated")

    monkeypatch.setattr(group, "main", fail)
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == CheckpointError.exit_code
    assert capsys.readouterr().err == "error: x.safetensors: truncated\n"


def test_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as e:
        main(["nonsense"])
    assert e.value.code == 2
    assert "nonsense" in capsys.readouterr().err
