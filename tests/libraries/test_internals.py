"""Internals of other libraries: where they are looked up, what is checked of them, and who may touch them."""

import ast
import logging
import re
from functools import cache
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from spes_mega import internals
from spes_mega.internals import IncompatibleError, Library, optional_patch
from tests.test_house import PRODUCT, ROOT

CLICK = Library("click", "8.0 to 8.9")
PATCHES = ("spes_mega/model/megatron_patches.py", "spes_mega/node/zero/deepspeed_patches.py")
PATCHED = ("deepspeed", "megatron")
OF_PYTHON = {"_asdict", "_fields", "_exit", "_Hash", "_shutdown"}
OF_TORCH = {"_foreach_norm", "_is_avx512_bf16_supported", "_is_amx_tile_supported", "_subclasses"}


@cache
def trees():
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in PRODUCT}


def defined_here(every_tree):
    """Names of everything that our own code defines: functions, classes, variables and attributes."""
    names = set()
    for item in (item for tree in every_tree for item in ast.walk(tree)):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            names.add(item.attr)
    return names


def test_no_private_attribute_of_another_library_is_used_outside_the_patches():
    every_tree = trees()
    known = defined_here(every_tree.values()) | OF_PYTHON | OF_TORCH
    foreign = {
        f"{name}: {ast.unparse(item)}"
        for name, tree in every_tree.items()
        for item in ast.walk(tree)
        if isinstance(item, ast.Attribute) and re.match(r"_[a-zA-Z]", item.attr) and item.attr not in known
        if name not in PATCHES
    }
    assert foreign == set()


def test_nothing_of_deepspeed_and_megatron_is_changed_outside_the_patches():
    changed = set()
    for name, tree in trees().items():
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for item in ast.walk(tree)
            if isinstance(item, ast.Import | ast.ImportFrom)
            for alias in item.names
            if (getattr(item, "module", None) or alias.name).partition(".")[0] in PATCHED
        }
        for item in ast.walk(tree):
            target = item.args[0] if isinstance(item, ast.Call) and ast.unparse(item.func) == "setattr" else item
            stored = isinstance(getattr(target, "ctx", None), ast.Store) or target is not item
            if stored and ast.unparse(target).partition(".")[0] in imported and name not in PATCHES:
                changed.add(f"{name}: {ast.unparse(item)}")
    assert changed == set()


@pytest.mark.parametrize("package", ["deepspeed", "megatron-core"])
def test_the_release_that_is_installed_is_below_a_bound(package):
    lines = [line.strip() for line in (ROOT / "setup.cfg").read_text().splitlines()]
    requirement = Requirement(next(line for line in lines if line.startswith(f"{package}>")))
    assert version(package) in requirement.specifier
    assert any(bound.operator == "<" for bound in requirement.specifier)


def test_an_attribute_is_found_by_its_path():
    import click

    assert CLICK.resolve("click.core:Group.add_command") is click.Group.add_command


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("click.bore:Group", "there is no module click.bore"),
        ("click.core:Group.subtract_command", "Group has no attribute subtract_command"),
        ("click.core:Troup", "click.core has no attribute Troup"),
    ],
)
def test_what_is_not_there_is_named_with_the_releases_that_have_it(path, fault):
    with pytest.raises(IncompatibleError) as e:
        CLICK.resolve(path)
    assert str(e.value) == (
        f"click {version('click')}: {fault}; spes-mega was written against 8.0 to 8.9: install click 8.0 to 8.9"
    )


def test_parameters_are_compared_from_the_first_on():
    def norm(gradients, params, norm_type=2):
        pass

    CLICK.check_parameters(norm, "gradients", "params")
    with pytest.raises(IncompatibleError, match=r"norm takes \(gradients, params, norm_type\), not \(params, …\)"):
        CLICK.check_parameters(norm, "params")


def test_a_function_is_asked_whether_it_uses_what_would_be_replaced():
    def rotate():
        return len(logging.root.name)

    CLICK.check_reads(rotate, "logging")
    CLICK.check_reads(rotate, "root")
    with pytest.raises(IncompatibleError, match="rotate does not use turn"):
        CLICK.check_reads(rotate, "turn")
    with pytest.raises(IncompatibleError, match="does not use turn"):
        CLICK.check_reads(len, "turn")


def test_a_patch_that_does_not_fit_is_left_out_with_one_line_of_rank_0(monkeypatch, caplog):
    @optional_patch("it takes longer")
    def patch(path):
        CLICK.resolve(path)

    internals._say_once.cache_clear()
    monkeypatch.setenv("RANK", "1")
    assert patch("click:nothing_of_rank_1") is False
    assert caplog.messages == []
    monkeypatch.setenv("RANK", "0")
    assert patch("click:command") is True
    assert [patch("click:nothing"), patch("click:nothing")] == [False, False]
    (line,) = caplog.messages
    assert line.startswith(f"warning: click {version('click')}: click has no attribute nothing; ")
    assert line.endswith("; until then it takes longer")


def test_an_error_that_is_no_misfit_is_not_taken_for_one():
    @optional_patch("it takes longer")
    def patch():
        raise ValueError("a fault of the patch")

    with pytest.raises(ValueError, match="a fault of the patch"):
        patch()
