import re
import subprocess
import sys
from pathlib import Path

import pytest

from spes_mega import errors
from spes_mega.cli import COMMANDS, group, main
from spes_mega.errors import CheckpointError, SpesError

EXIT_CODES = Path(__file__).parents[1] / "docs/reference/exit-codes.md"

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


def test_the_exit_codes_that_operators_read_of_are_those_of_the_errors():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SpesError)]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", EXIT_CODES.read_text(), re.MULTILINE)}
    assert told - {0, 2} == {kind.exit_code for kind in kinds}
    # 1 is for what has no kind; else only a narrower kind has the code of another one
    own = {kind.exit_code: kind for kind in kinds if kind.__base__ is SpesError and kind.exit_code != 1}
    assert all(issubclass(kind, own[kind.exit_code]) for kind in kinds if kind.exit_code != 1)


def test_keys_that_are_not_there_are_no_refusal_of_the_hub(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        main(["status", "--hub", "127.0.0.1:1", "--keys", str(tmp_path)])
    assert e.value.code == 9
    assert str(tmp_path) in capsys.readouterr().err
