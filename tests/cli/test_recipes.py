"""``amos recipes``: tokens, FLOPs and predicted hours."""

import json
import shutil
from pathlib import Path

import pytest
from failures import error_line

from amos_fairseq.cli import recipes
from amos_fairseq.cli.main import main
from amos_fairseq.recipe_files import RECIPES, packaged_recipes


def test_costs_of_recipes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Tokens by hand; FLOPs as of ``amos flops``; hours from the rates that the help states."""
    mine = tmp_path / "mine.yaml"
    start = "# @package _global_\ndefaults: [/fairseq/defaults@_global_, /mlm_tiny, _self_]\n"
    mine.write_text(f"{start}optimization: {{max_update: 10}}\n")
    main(["recipes", "mlm_tiny", str(mine), "--json"])
    tiny, own = json.loads(capsys.readouterr().out)
    assert tiny["tokens"] == 1750 * 128 * 64
    assert own["recipe"] == str(mine)
    assert own["tokens"] == 10 * 128 * 64
    assert own["flops"] * 175 == tiny["flops"]
    main(["flops", "mlm_tiny", "--vocabulary-size", "405", "--reference", "--json"])
    assert tiny["flops"] == json.loads(capsys.readouterr().out)["training"]["today"]["total"]
    assert tiny["predicted_a100_hours"] == pytest.approx(tiny["flops"] / (0.4 * 312e12) / 3600)
    assert tiny["predicted_cpu_hours"] == pytest.approx(tiny["flops"] / 0.064e12 / 3600)


def test_table_has_a_row_for_each_recipe(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed width keeps the columns under their names."""
    row = {"layers": 24, "width": 1024, "length": 512, "max_update": 1_950_000, "tokens": 2.04e12, "flops": 2.1e21}
    names = packaged_recipes() + packaged_recipes("variants/*.yaml")
    monkeypatch.setattr(recipes, "counted_costs", lambda: {name: {"recipe": name, **row} for name in names})
    main(["recipes"])
    *head, first, second = capsys.readouterr().out.splitlines()[:4]
    main(["recipes", "--variants"])
    rows = capsys.readouterr().out.splitlines()[2:-1]
    assert sorted(line.split()[0] for line in rows) == names
    assert [line.split()[0] for line in (first, second)] == ["amos_tiny", "electra_tiny"]
    assert first.split()[1:] == ["24", "x", "1024", "512", "1,950,000", "2e+12", "2.1e+21", "4,674", "4,050,926"]
    for name in ("width", "length", "updates", "tokens", "FLOPs"):  # the end of a column is that of its name
        assert first[head[1].index(name) + len(name) - 1] != " "
        assert first[head[1].index(name) + len(name)] == " "


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amos_tiny", "electric_tiny", "teams_small", "mlm_base"])
def test_file_has_the_numbers_that_are_counted(name: str) -> None:
    """The file is of these recipes, and has what ``amos flops`` counts."""
    counted = recipes.counted_costs()
    assert sorted(counted) == sorted(packaged_recipes() + packaged_recipes("variants/*.yaml")), (
        "a recipe was changed: run python -m amos_fairseq.cli.recipes"
    )
    assert counted[name] == recipes.recipe_costs(name, RECIPES, name), "run python -m amos_fairseq.cli.recipes"


def test_changed_recipe_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(RECIPES, tmp_path / "recipes")
    monkeypatch.setattr(recipes, "RECIPES", tmp_path / "recipes")
    assert recipes.counted_costs()
    with (tmp_path / "recipes" / "sizes" / "tiny.yaml").open("a") as file:
        file.write("# another value\n")
    assert not recipes.counted_costs()


def test_recipe_that_cannot_be_counted_has_its_reason(capsys: pytest.CaptureFixture) -> None:
    """The weights of this variant are those of a finished run."""
    main(["recipes", "variants/amos_final_mixture"])
    assert "variants/amos_final_mixture  not counted: " in capsys.readouterr().out


def test_unknown_recipe_is_one_line(capsys: pytest.CaptureFixture) -> None:
    line = error_line(capsys, main, "recipes", "mlm_tiny", "amos_bass")
    assert "there is no recipe amos_bass" in line
    assert "did you mean amos_base or " in line
