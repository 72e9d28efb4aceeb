"""Recipes, overlays, settings and JSON files that a reader could stumble over: one line, never a traceback."""

import pytest

from spes_mega.cli import main
from spes_mega.errors import CheckpointError, RecipeError
from spes_mega.files.text import read_json
from spes_mega.layout import open_checkpoint
from spes_mega.recipe import load_recipe, override_recipe
from spes_mega.recipe.strict_yaml import MAX_VALUES, parse_yaml

RECIPE = """\
model:
  family: qwen3_moe
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 2
  head_dim: 16
  num_experts: 4
  top_k: 2
  expert_hidden_size: 32
  vocab_size: 256
"""
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
)

HARMLESS = b"name: 2026-12-01\ndeepspeed: {a: &x {b: 1}, c: {<<: *x, d: 5e8}}\n"

# what is added to a good recipe, and what the message must have; its line is counted from 1
BAD = {
    "date that is none": ("name: 2026-13-45\ndeepspeed: {a: !!timestamp 2026-13-45}", ["timestamp", ":13:"]),
    "float of a word": ("train: {lr: !!float abc}", ["abc", ":12:"]),
    "int of a word": ("train: {steps: !!int abc}", ["abc", ":12:"]),
    "bool of a word": ("model2: {tie: !!bool abc}", ["abc", ":12:"]),
    "5000 digits": (f"train: {{steps: {'9' * 5000}}}", ["9999", "5,000 characters", ":12:"]),
    "more than a float": (f"train: {{lr: 1{'0' * 400}}}", ["more than 63 bits", ":12:"]),
    "more than a float, quoted": (f"train: {{lr: '1{'0' * 400}'}}", ["train.lr"]),
    "hexadecimal": (f"train: {{lr: 0x{'f' * 400}}}", ["more than 63 bits", ":12:"]),
    "quoted digits": (f"train: {{steps: '1{'0' * 400}'}}", ["train", "steps", "63 bits"]),
    "quoted 5000 digits": (f"train: {{steps: '{'9' * 5000}'}}", ["train.steps"]),
    "infinite": ("train: {lr: .inf}", ["train.lr", "finite"]),
    "not a number": ("train: {lr: .nan}", ["train.lr", "finite"]),
    "infinite in a free section": ("deepspeed: {a: {b: .inf}}", ["deepspeed", "inf"]),
    "1e400 in a free section": ("deepspeed: {a: 1e400}", ["deepspeed", "inf"]),
    "nested lists": (f"deepspeed: {{a: {'[' * 3000}{']' * 3000}}}", ["nested over", ":12:"]),
    "nested mappings": (f"deepspeed: {'{a: ' * 3000}1{'}' * 3000}", ["nested over", ":12:"]),
    "nested blocks": ("deepspeed:\n" + "".join(" " * i + "a:\n" for i in range(1, 400)), ["nested over"]),
    "open brackets": ("deepspeed: " + "[" * 20_000, ["nested over"]),
    "a list in itself": ("deepspeed: {a: &x [*x]}", ["holds itself", ":12:"]),
    "a mapping in itself": ("deepspeed: &x {a: *x}", ["holds itself", ":12:"]),
    "itself by merging": ("deepspeed: &x\n  <<: *x", ["holds itself"]),
    "alias bomb": (f"deepspeed:\n  {BOMB.replace(chr(10), chr(10) + '  ')}", [f"over {MAX_VALUES:,} values"]),
    "key twice": ("train: {steps: 1}\ntrain: {steps: 2}", ["train", "lines 12 and 13"]),
    "key twice in a section": ("train:\n  steps: 1\n  lr: 1\n  steps: 2", ["steps", "lines 13 and 15"]),
    "key twice in a free section": ("deepspeed: {a: {b: 1, b: 2}}", ["key b", "lines 12 and 12"]),
    "key that is a number": ("1: 2", ["key 1", ":12:"]),
    "key that is a truth value": ("on: 2", ["key on", ":12:"]),
    "key that is a list": ("? [a]\n: 2", ["a list", ":12:"]),
    "Python object": ("name: !!python/object/apply:os.getcwd []", ["python/object", ":12:"]),
    "binary": ("name: !!binary aGk=", ["binary", ":12:"]),
    "set": ("deepspeed: !!set {a}", ["set", ":12:"]),
    "own tag": ("name: !mine x", ["!mine", ":12:"]),
    "tab": ("train:\n\tsteps: 1", [":13:", "\\t"]),
    "two documents": ("---\nname: x", ["single document", ":12:"]),
    "unknown alias": ("name: *x", ["undefined alias", ":12:"]),
    "character that YAML forbids": ("name: \x07", ["\\x07", ":12:"]),
    "NUL in a path": ('data: {train: "a\\0b"}', ["data.train", "NUL"]),
    "long value of a wrong kind": (f"train: {{steps: {'x' * 100_000}}}", ["train.steps", "100,002 characters"]),
}


def message_of(call, kind=RecipeError):
    with pytest.raises(kind) as e:
        call()
    message = str(e.value)
    assert "\n" not in message, message
    assert len(message) < 2000, f"{len(message)} characters"
    return message


@pytest.mark.parametrize("case", BAD)
def test_a_recipe_is_refused_in_one_line_that_names_the_place(tmp_path, case):
    text, expected = BAD[case]
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + text + "\n")
    message = message_of(lambda: load_recipe(path))
    assert message.startswith(str(path))
    assert all(part in message.replace("1 characters", "2 characters") for part in expected), message


@pytest.mark.parametrize("case", ["float of a word", "5000 digits", "alias bomb", "key twice", "a mapping in itself"])
def test_an_overlay_is_refused_by_its_own_name(tmp_path, case):
    recipe, overlay = tmp_path / "recipe.yaml", tmp_path / "overlay.yaml"
    recipe.write_text(RECIPE)
    overlay.write_text(BAD[case][0])
    assert message_of(lambda: load_recipe(recipe, [overlay])).startswith(str(overlay))


@pytest.mark.parametrize(
    "value", ["!!float abc", "9" * 5000, "[" * 3000, "&x [*x]", "{a: 1, a: 2}", "!!timestamp 2026-13-45", "\t", "\x07"]
)
def test_a_setting_is_refused_by_its_own_name(tmp_path, value):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    message = message_of(lambda: load_recipe(recipe, [f"deepspeed.a={value}"]))
    assert message.startswith("--set deepspeed.a=")


def test_a_setting_within_a_thousand_sections_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    assert "nested over 50 deep" in message_of(lambda: load_recipe(recipe, ["a." * 1000 + "b=1"]))


def test_of_very_many_faults_some_are_told(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE + "".join(f"x{n}: 1\n" for n in range(20_000)))
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe)
    lines = str(refused.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "and 19,980 more"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "mapping"),
        (b"- a\n", "mapping"),
        (b"\xff\xfe" + RECIPE.encode("utf-16-le"), ":1: not UTF-8: byte 0xff"),
        (RECIPE.encode() + b"name: \xe4\n", ":12: not UTF-8: byte 0xe4"),
        (b"#" * (5 << 20), "over 4 MiB"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, expected):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert expected in message_of(lambda: load_recipe(path))


def test_what_is_harmless_still_works(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(
        b"\xef\xbb\xbf" + RECIPE.encode() + b"name: 2026-12-01\ndeepspeed: {a: &x {b: 1}, c: {<<: *x, d: 5e8}}\n"
    )
    recipe = load_recipe(path, ["train.lr=1e-3"])
    assert recipe.name == "2026-12-01"
    assert recipe.deepspeed == {"a": {"b": 1}, "c": {"b": 1, "d": 5e8}}
    assert recipe.train.lr == 1e-3
    assert override_recipe(recipe, ["train.lr=2.0"]).train.lr == 2


def test_aliases_are_counted_as_what_they_stand_for():
    shared = f"a: &a [{', '.join('x' * 900)}]\nb: [{', '.join(['*a'] * 500)}]\n"
    assert len(parse_yaml(shared)["b"]) == 500


def test_a_device_is_no_endless_recipe(capsys):
    with pytest.raises(SystemExit) as e:
        main(["recipe", "/dev/zero"])
    assert e.value.code == 3
    assert "over 4 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", ":1: not valid JSON"),
        ('{"a": 1,\n\n"a" 2}', ":3: not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"a": {"9" * 5000}}}', "digits"),
    ],
)
def test_a_json_file_is_refused_in_one_line(tmp_path, text, expected):
    path = tmp_path / "config.json"
    path.write_text(text)
    message = message_of(lambda: read_json(path, CheckpointError), CheckpointError)
    assert message.startswith(str(path))
    assert expected in message
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert str(path) in message_of(lambda: open_checkpoint(weights, path), CheckpointError)
