"""``amos recipes``: tokens, FLOPs and predicted hours."""

import json
from pathlib import Path

import pytest
from failures import error_line

from amos_fairseq.cli.main import main
from amos_fairseq.measure import recipe_costs
from amos_fairseq.predicted_time import predicted_seconds
from amos_fairseq.recipes import packaged_recipes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the file of costs in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "amos_fairseq" / "recipe_costs.json"


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
    assert tiny["predicted_a100_hours"] == pytest.approx(tiny["flops"] / (0.34 * 312e12) / 3600)
    assert tiny["predicted_cpu_hours"] == pytest.approx(tiny["flops"] / 0.064e12 / 3600)


@pytest.mark.parametrize(("width", "rate"), [(64, 0.064e12), (128, 0.082e12), (256, 0.144e12)])
def test_narrow_models_reach_less_of_a_cpu(width: int, rate: float) -> None:
    assert predicted_seconds(6e15, width)["cpu"] == pytest.approx(6e15 / rate)


def test_table_has_a_row_for_each_recipe(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed width keeps the columns under their names."""
    row = {"layers": 24, "width": 1024, "length": 512, "max_update": 1_950_000, "tokens": 2.04e12, "flops": 2.1e21}
    names = packaged_recipes() + packaged_recipes("variants/*.yaml")
    monkeypatch.setattr(recipe_costs, "count_costs", lambda *arguments: row)
    main(["recipes"])
    *head, first, second = capsys.readouterr().out.splitlines()[:4]
    main(["recipes", "--variants"])
    rows = capsys.readouterr().out.splitlines()[2:-1]
    assert sorted(line.split()[0] for line in rows) == sorted(names)
    assert [line.split()[0] for line in (first, second)] == ["amos_tiny", "electra_tiny"]
    assert first.split()[1:] == ["24", "x", "1024", "512", "1,950,000", "2e+12", "2.1e+21", "5,499", "4,050,926"]
    for name in ("width", "length", "updates", "tokens", "FLOPs"):  # the end of a column is that of its name
        assert first[head[1].index(name) + len(name) - 1] != " "
        assert first[head[1].index(name) + len(name)] == " "


def test_counted_costs_are_kept_until_a_file_changes(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def counted() -> tuple[list[str], str]:
        """The recipes that two rows needed counting, and what is printed."""
        names: list[str] = []
        count = recipe_costs.count_costs
        with monkeypatch.context() as patch:
            patch.setattr(recipe_costs, "count_costs", lambda name, *rest: names.append(name) or count(name, *rest))
            main(["recipes", "mlm_tiny", "variants/amos_final_mixture"])
        return names, capsys.readouterr().out

    both = ["mlm_tiny", "variants/amos_final_mixture"]
    names, first = counted()
    assert names == both
    # The weights of this variant are those of a finished run.
    assert "variants/amos_final_mixture  not counted: " in first
    assert counted() == ([], first)
    monkeypatch.setattr(recipe_costs, "content_hash", lambda: "of other files")
    assert counted() == (both, first)
    cache.write_text("{")
    assert counted() == (both, first)
    cache.unlink()
    cache.mkdir()  # nothing can be written there
    assert counted() == (both, first)


def test_hash_is_that_of_recipes_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_costs, "PACKAGE", tmp_path)
    found = {recipe_costs.content_hash()}
    for file, content in (("a.yaml", "lr: 1"), ("a.yaml", "lr: 2"), ("b/x.py", ""), ("b/y.py", "")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
        found.add(recipe_costs.content_hash())
    assert len(found) == 5
    (tmp_path / "notes.txt").write_text("no part of a recipe")
    assert recipe_costs.content_hash() in found


def test_unknown_recipe_is_one_line(capsys: pytest.CaptureFixture) -> None:
    line = error_line(capsys, main, "recipes", "mlm_tiny", "amos_bass")
    assert "there is no recipe amos_bass" in line
    assert "did you mean amos_base or " in line
