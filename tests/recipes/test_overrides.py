"""Settings of recipes are those that Hydra composes; KEY=VALUE of ``amos train``, read by Hydra's own parser."""

import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.recipes import RECIPES, packaged_recipes
from amos_fairseq.recipes.composition import compose_with_hydra
from amos_fairseq.recipes.overrides import PATHS, check_settings, for_hydra, known_settings

OF_EACH_FORM = ["electra_modern_mini", "variants/electra_unigram", "variants/teams_extra_layer", "amos_tiny"]


@pytest.mark.parametrize("name", OF_EACH_FORM)
def test_known_settings_are_those_of_hydra(name: str) -> None:
    composed = compose_with_hydra(name, with_hydra_settings=False)
    expected = {
        f"{section}.{key}" for section, values in composed.items() if OmegaConf.is_dict(values) for key in values
    }
    found = {setting for setting in known_settings(RECIPES, name) if not setting.startswith("hydra.")}
    assert found == {setting for setting in expected if setting in found or not setting.endswith("._name")}


def test_every_recipe_is_read() -> None:
    assert all(known_settings(RECIPES, name)["task.data"] == "???" for name in packaged_recipes())


def test_defaults_of_other_kinds_are_left_to_hydra(tmp_path: Path) -> None:
    for name, defaults in {"group": "[{model: amos}]", "broken": "[/absent]", "itself": "[itself]"}.items():
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {defaults}\ntask:\n  data: ???\n")
        assert known_settings(tmp_path, name) == {}
    (tmp_path / "model").mkdir()
    check_settings(["model=small", "task.data=absent"], tmp_path, "group")  # what fairseq's own task reads is not known


# What Hydra would refuse, or read as something else: values of other types, lists, sweeps.
UNUSUAL = ["a=b", "a#1", "ünï/中文", "it's", 'say "a"', "a,b", "[a]", "{a}", "a(b)", "glob(x)", " a ", "1e5", "true"]
UNUSUAL += ["0x1f", "1_0", "a&b;c!^`<>", "a'b,c", "back\\slash", "quote\\'s", "ends with\\", "$HOME/x", "/a:b/c", "."]


@pytest.mark.parametrize("value", UNUSUAL)
def test_a_path_is_read_as_it_is_typed(value: str) -> None:
    for key in PATHS:
        (override,) = for_hydra([f"{key}={value}"])
        assert OverridesParser.create().parse_override(override).value() == value


def test_what_hydra_reads_remains() -> None:
    """Quoted by the user, unset, an interpolation, an escape; other settings, options of Hydra and their values."""
    paths = [
        "task.data='a b'",
        'task.data="a=b"',
        "checkpoint.restore_file=null",
        "task.data=${oc.env:HOME}/x",
        r"task.data=a\,b",
    ]
    others = [
        "optimization.lr=[0.1]",
        "+model.x={a: 1}",
        "~model.y",
        "--cfg",
        "job",
        "-m",
        "--config-dir",
        "/a=b/c#d",
        "common.seed=1,2",
    ]
    assert for_hydra(paths + others) == paths + others


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each shard too; shells expand it only at the beginning of a word."""
    monkeypatch.setenv("HOME", "/home/m m")
    assert for_hydra(["task.data=~/a:~/b"]) == ["task.data=/home/m m/a:/home/m m/b"]
    assert for_hydra(["task.data=a:~/b"]) == ["task.data=a:/home/m m/b"]
    assert for_hydra(["checkpoint.save_dir=~/a#b"]) == ["checkpoint.save_dir='/home/m m/a#b'"]


def test_a_value_that_hydra_cannot_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the path of something that exists."""
    monkeypatch.chdir(tmp_path)
    for setting in ("optimization.lr=[0.1", "criterion.x=a#b", "criterion.x=~"):
        with pytest.raises(UserError, match=r"Hydra cannot read the value \(.*quote a text, as in '") as refusal:
            for_hydra([setting])
        assert str(refusal.value).startswith(setting)
    os.mkdir("a#b")
    assert for_hydra(["criterion.x=a#b"]) == ["criterion.x='a#b'"]
