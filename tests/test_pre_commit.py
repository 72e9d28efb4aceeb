"""What is checked before a commit is what `make lint` checks."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_hooks_are_the_checks_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = config["repos"]
    hooks = {hook["entry"].removesuffix(" --force-exclude"): hook for hook in repository["hooks"]}
    recipe = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    lint = [re.sub(r" --check| \.$", "", line).replace("$(BIN)", ".venv/bin") for line in recipe.split("\t")[1:]]
    assert list(hooks) == [re.sub(r" \.$", "", line.strip()) for line in lint]
    assert all(hook["language"] == "system" for hook in hooks.values())
