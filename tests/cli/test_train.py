"""``amos train``: the command of ``fairseq-hydra-train`` that it starts. tests/recipes/test_hydra_train.py runs it."""

import sys
from pathlib import Path

import pytest
from failures import error_line
from hydra.core.override_parser.overrides_parser import OverridesParser

from amos_fairseq.cli.main import main
from amos_fairseq.python_process import python_command
from amos_fairseq.recipes import PACKAGE, RECIPES, quoted


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that replace this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda program, command, _: commands.append([program, *command]))
    return commands


def test_recipe_by_name_and_by_path(started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("task: {}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "longer.yaml").write_text("defaults: [/amos_base]")
    script = [sys.executable, *python_command("fairseq_cli.hydra_train")]
    plugin = f"common.user_dir='{PACKAGE}'"
    own = [f"hydra.searchpath=['file://{RECIPES}']", plugin]
    main(["train", "amos_base", "task.data=D", "--multirun"])
    main(["train", str(RECIPES / "variants" / "electra_tt.yaml"), "common.user_dir=elsewhere"])
    main(["train", "mine.yaml"])
    main(["train", "own/longer.yaml"])
    assert started == [
        [*script, "--config-dir", str(RECIPES), "--config-name", "amos_base", plugin, "task.data=D", "--multirun"],
        [*script, "--config-dir", str(RECIPES), "--config-name", "variants/electra_tt", "common.user_dir=elsewhere"],
        [*script, "--config-dir", str(tmp_path), "--config-name", "mine", *own],
        [*script, "--config-dir", str(tmp_path), "--config-name", "own/longer", *own],
    ]


@pytest.mark.parametrize("setting", ["scoring=true", "optimizer=null"])
def test_a_value_in_place_of_a_group_is_one_line(setting, started, capsys) -> None:
    name = setting.lstrip("+").partition("=")[0]
    line = error_line(capsys, main, "train", "amos_base", "task.data=D", setting)
    assert f"{setting}: {name} is a group of settings: name one of them, as in {name}._name=VALUE" in line
    assert started == []


@pytest.mark.parametrize("path", ["/a,b=[c]{d}", "/it's", r"/back\slash/x"])
def test_paths_are_quoted_for_hydra(path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"common.user_dir={quoted(path)}"])
    assert override.value() == path


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("amos_bas", "amos_bas: name one that amos recipes lists, or the path of a YAML file; did you mean amos_base"),
        ("absent.yaml", "absent.yaml is missing"),
        ("old.yml", "old.yml: Hydra reads *.yaml only"),
        ("broken.yaml", "broken.yaml is not YAML"),
    ],
)
def test_missing_recipe_is_one_line(recipe, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yml").touch()
    (tmp_path / "broken.yaml").write_text("a: [")
    assert message in error_line(capsys, main, "train", recipe)
