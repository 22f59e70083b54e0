"""The settings of recipes, read from their files, are those that Hydra composes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from amos_fairseq.recipes import RECIPES, packaged_recipes
from amos_fairseq.recipes.composition import compose_with_hydra
from amos_fairseq.recipes.known_settings import check_settings, known_settings

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
