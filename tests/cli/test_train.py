"""``amos train``: the command of ``fairseq-hydra-train`` that it starts. tests/recipes/test_hydra_train.py runs it."""

import sys
from pathlib import Path

import pytest
from failures import error_line
from hydra.core.override_parser.overrides_parser import OverridesParser

from amos_fairseq.cli.main import main
from amos_fairseq.process import python_command
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
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "dict.txt").touch()
    (tmp_path / "own" / "longer.yaml").write_text("defaults: [/amos_base]")
    script = [sys.executable, *python_command("fairseq_cli.hydra_train"), "--config-dir"]
    plugin, other = f"common.user_dir='{PACKAGE}'", "common.user_dir=elsewhere"
    own = [f"hydra.searchpath=['file://{RECIPES}']", plugin]
    main(["train", "amos_base", "task.data=D", "--resolve"])
    main(["train", str(RECIPES / "variants" / "electra_tt.yaml"), "task.data=D:D", other])
    main(["train", "mine.yaml"])
    main(["train", "own/longer.yaml", "--cfg", "job"])
    for words in ("amos_base task.data=D --minutes 1.5 --resolve", "--minutes 1.5 amos_base task.data=D --resolve"):
        main(["train", *words.split()])
        assert started.pop()[-3:] == ["lr_scheduler.minutes=1.5", "task.data=D", "--resolve"]
    assert started == [
        [*script, str(RECIPES), "--config-name", "amos_base", plugin, "task.data=D", "--resolve"],
        [*script, str(RECIPES), "--config-name", "variants/electra_tt", "task.data=D:D", other],
        [*script, str(tmp_path), "--config-name", "mine", *own],
        [*script, str(tmp_path), "--config-name", "own/longer", *own, "--cfg", "job"],
    ]


@pytest.mark.parametrize("path", ["/a,b=[c]{d}", "/it's", r"/back\slash/x"])
def test_paths_are_quoted_for_hydra(path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"common.user_dir={quoted(path)}"])
    assert override.value() == path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "amos_base task.data=/ optimisation.max_update=9",
            "no setting optimisation.max_update; did you mean optimizat",
        ),
        ("amos_base task.data=/ task.mask_prb=0.1", "base has no setting task.mask_prb; did you mean task.mask_prob?"),
        ("amos_base data=/", "task.data is missing: give task.data=DIR"),
        ("amos_base task.data=/ data=/", "amos_base has no setting data; did you mean task.data?"),
        (
            "amos_base task.data=/ optimization.lr=NULL optimization.lr=1e-3",
            "lr=1e-3: the value is a list: write optimization.lr=[1e-3]",
        ),
        ("amos_base task.data=/ --minutes -1", "--minutes: -1 must be at least 0.001"),
        ("amos_bas", "amos_bas: name one that amos recipes lists, or the path of a YAML file; did you mean amos_base"),
        ("absent.yaml", "absent.yaml is no file *.yaml"),
        ("old.yml", "old.yml is no file *.yaml"),
        ("broken.yaml", "broken.yaml is not YAML"),
        ("twice.yaml", "twice.yaml is not YAML that can be read (a key is there twice): correct the recipe"),
    ],
)
def test_a_mistake_is_one_line_before_fairseq_starts(words, message, started, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yml").touch()
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "twice.yaml").write_text("common:\n  seed: 1\n  seed: 2\n")
    assert message in error_line(capsys, main, "train", *words.split())
    assert started == []
