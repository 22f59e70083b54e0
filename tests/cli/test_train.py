"""``amos train``: the command of ``fairseq-hydra-train`` that it starts. tests/config/test_hydra_train.py runs it."""

import sys
from pathlib import Path

import pytest
from failures import error_line
from hydra.core.override_parser.overrides_parser import OverridesParser

from amos_fairseq.cli.main import main
from amos_fairseq.recipe_files import PACKAGE, RECIPES, quoted


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that replace this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, command: commands.append([program, *command]))
    return commands


def test_recipe_by_name_and_by_path(started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("task: {}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "longer.yaml").write_text("defaults: [/amos_base]")
    script = [sys.executable, sys.executable, "-m", "fairseq_cli.hydra_train"]
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


def test_help_is_ours_at_any_place(started: list[list[str]], capsys: pytest.CaptureFixture) -> None:
    main(["train", "amos_base", "--help"])
    assert capsys.readouterr().out.startswith("usage: amos train")
    assert started == []


@pytest.mark.parametrize("path", ["/with space", "/a,b=[c]{d}", "/it's", r"/back\slash/x"])
def test_paths_are_quoted_for_hydra(path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"common.user_dir={quoted(path)}"])
    assert override.value() == path


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "amos_bas",
            "there is no recipe amos_bas: name one that amos recipes lists, or the path of a YAML file; did you mean amos_base",
        ),
        ("absent.yaml", "absent.yaml is missing"),
        ("old.yml", "old.yml: Hydra reads *.yaml only"),
        ("broken.yaml", "broken.yaml is not YAML"),
    ],
)
def test_missing_recipe_is_one_line(
    recipe: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yml").touch()
    (tmp_path / "broken.yaml").write_text("a: [")
    assert message in error_line(capsys, main, "train", recipe)
