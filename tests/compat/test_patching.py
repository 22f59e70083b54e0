"""Functions of modules, classes and fairseq's training script are replaced, each once."""

import sys
from types import ModuleType
from typing import Any

import pytest

from amos_fairseq.compat import PATCHES
from amos_fairseq.compat.patching import Patch, Script, patch_training_script
from amos_fairseq.downstream.classification import task as text_task
from amos_fairseq.run.hooks import REPLACED

ALL = [*(patch for patches in PATCHES.values() for patch in patches), *REPLACED, *text_task.REPLACED]


def test_each_function_is_replaced_once() -> None:
    """Also in fact: what a replacement calls is not ours."""
    functions = [(patch.owner, patch.name) for patch in ALL]
    assert len(set(functions)) == len(functions)
    for owner, name in functions:
        if not isinstance(owner, Script):  # replaced where it runs
            attribute = getattr(owner, name)
            replaced = getattr(attribute, "fget", attribute)
            assert is_ours(replaced)
            assert not is_ours(getattr(replaced, "__wrapped__", None))  # a class has none


def is_ours(function: Any) -> bool:
    return getattr(function, "__code__", "no function") in Patch.apply_to.__code__.co_consts


def test_a_training_script_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module may have two names, and a sweep creates several trainers."""
    names = {patch.name for patch in ALL if patch.owner is Script.TRAINING}
    assert names == {"train", "validate", "validate_and_save"}
    script = ModuleType("script")
    stock = {name: lambda *args: None for name in names}
    vars(script).update(stock)
    for name in ("fairseq_cli.train", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, script)
    for _ in range(2):
        patch_training_script()
    assert {name: getattr(script, name).__wrapped__ for name in names} == stock
