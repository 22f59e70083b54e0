"""``amos recipes`` and its table of costs."""

from pathlib import Path

import pytest

from amos_fairseq import flops
from amos_fairseq.cli.main import main
from amos_fairseq.flops import count_costs
from amos_fairseq.recipes import RECIPES, find_recipe, packaged_costs, packaged_recipes
from amos_fairseq.recipes.composition import compose_recipe


@pytest.mark.slow
def test_the_table_has_all_recipes_with_their_sizes_and_tokens() -> None:
    """After a change of a recipe: python tests/recipes/write_costs.py."""
    table = packaged_costs()
    assert list(table) == packaged_recipes() + packaged_recipes("variants/*.yaml")
    # A time is planned, or the weights of the variant are those of a finished run.
    of_time = [f"{objective}_modern_{time}" for objective in ("amos", "electra", "mlm") for time in ("day", "evening")]
    assert [name for name in table if "not_counted" in table[name]] == [*of_time, "variants/amos_final_mixture"]
    for name in ("amos_base", "electra_small", "electric_tiny", "mlm_modern_mini", "teams_large"):
        costs = table[name]
        cfg = compose_recipe(name, ["distributed_training.distributed_world_size=1"])
        sizes = (cfg.model.encoder_layers, cfg.model.encoder_embed_dim, cfg.task.tokens_per_sample)
        assert (costs["layers"], costs["width"], costs["length"]) == sizes
        sequences = cfg.dataset.batch_size * cfg.optimization.update_freq[0] * cfg.optimization.max_update
        assert costs["tokens"] == sequences * cfg.task.tokens_per_sample
        assert costs["vocabulary_size"] == {64: 405, 128: 4005}.get(costs["width"], 32_768)


@pytest.mark.slow
def test_the_table_has_the_flops_that_are_counted() -> None:
    """Their formulas are in tests/flops."""
    for name in ("variants/electra_all_shared", "mlm_modern_evening"):
        assert packaged_costs()[name] == count_costs(name, RECIPES)


def test_recipes_of_the_user_are_counted(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    start = "# @package _global_\ndefaults: [/fairseq/defaults@_global_, /mlm_tiny, _self_]\n"
    mine.write_text(f"{start}optimization: {{max_update: 10}}\n")
    folder, name = find_recipe(str(mine))
    tiny, own = packaged_costs()["mlm_tiny"], count_costs(name, folder)
    assert tiny["tokens"] == 1750 * 128 * 64
    assert own["tokens"] == 10 * 128 * 64
    assert own["flops"] * 175 == tiny["flops"]
    main(["recipes", "mlm_tiny", str(mine)])
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == [str(mine), "2", "x", "64", "64", "10", f"{own['tokens']:.2g}", f"{own['flops']:.2g}"]


def test_the_table_is_printed_without_counting(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers are below the ends of their names."""
    monkeypatch.setattr(flops, "count_costs", None)
    main(["recipes", "--variants"])
    head, *rows = capsys.readouterr().out.splitlines()[1:]
    assert sorted(row.split()[0] for row in rows) == sorted(packaged_costs())
    assert rows[0].split()[:5] == ["amos_tiny", "2", "x", "64", "64"]
    for name in ("width", "length", "updates", "tokens", "FLOPs"):
        end = head.index(name) + len(name)
        assert {(row[end - 1 : end + 1].strip() != "") for row in rows if "not counted" not in row} == {True}
