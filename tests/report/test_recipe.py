"""The comparison with the paper's recipe, on packaged recipes with known changes."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from amos_fairseq.output.tables import Table
from amos_fairseq.recipes import packaged_recipes
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.report.page import Page, Section, render_page, render_table
from amos_fairseq.report.recipe import compare_settings, paper_recipe, shown, sources
from amos_fairseq.report.runs import PretrainingCost, PretrainingRun
from amos_fairseq.report.sections import recipe_section


def section_of(cfg: DictConfig) -> tuple[Section, str]:
    """Return the section of a run with these settings, and its HTML."""
    batch = cfg.dataset.batch_size * cfg.optimization.update_freq[0]
    cost = PretrainingCost(1, tokens_per_update=batch * cfg.task.tokens_per_sample)
    section = recipe_section([PretrainingRun(Path("run"), "run", cost, cfg=cfg)])
    return section, render_page(Page("", "", [section], []), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_recipes())
def test_a_recipe_with_its_own_values(name: str) -> None:
    cfg = compose_recipe(name)
    compared_with = paper_recipe(cfg)
    section, html = section_of(cfg)
    if compared_with == name:
        assert section.notes[0] == f"run: no setting differs from {name}."
        assert section.notes[0] in html
        assert f"sequences per update {cfg.dataset.batch_size * cfg.optimization.update_freq[0]}" in section.notes[1]
        assert "<table>" not in html
    else:  # a size that no paper has
        assert compared_with == name.rpartition("_")[0].replace("_base", "") + "_base"
        assert "no setting differs" not in html
        assert "<td" in html


def test_changed_settings_have_the_papers_value_and_source():
    cfg = compose_recipe("amos_base", ["optimization.lr=[0.001]", "model.generator_depths='2,4'", "model.dropout=0"])
    changed = {setting.name: setting for setting in compare_settings(cfg, "amos_base", None) if setting.differs}
    assert sorted(changed) == ["model.dropout", "model.generator_depths", "optimization.lr"]
    assert changed["optimization.lr"][1:] == ("0.001", "0.0005", "AMOS, Table 3, peak")
    assert changed["model.generator_depths"].is_of_paper


def test_other_widths_are_compared_with_base():
    assert paper_recipe(compose_recipe("electra_tiny")) == "electra_base"


def test_sources_are_the_comments_of_the_recipe():
    found = sources("amos_base")
    assert found["task.mask_prob"] == "AMOS, Appendix B"
    assert found["model.kernels"].startswith("ours")
    assert found["lr_scheduler.end_learning_rate"] == ""


@pytest.mark.parametrize(
    ("name", "setting", "source"),
    [
        ("amos_small", "optimization.lr", "thesis, Table 5.1, peak"),
        ("amos_small", "model.generator_depths", "ours, as in base"),
        ("amos_large", "lr_scheduler.warmup_updates", "thesis, Table 5.1"),
        ("mlm_large", "task.mask_prob", "as in BERT; the 25 of thesis, Table 5.1 is for ELECTRA (section 5.2.3)"),
        ("teams_large", "task.tokens_per_sample", "ours: as TEAMS, section 4.1, for small and base"),
        ("electra_small", "task.mask_prob", "thesis, Table 5.1"),  # of base, for the same value
    ],
)
def test_a_size_has_its_own_sources_where_its_value_is_that_of_base(name: str, setting: str, source: str) -> None:
    assert sources(name)[setting] == source


def test_equal_values_look_equal():
    assert shown(50) == shown(50.0) == "50"
    assert shown([5e-4]) == shown([0.0005]) == "0.0005"
    assert shown(None) == shown("") == "none"


def test_a_table_without_rows_has_its_head():
    head = '<thead><tr><th scope="col">a</th><th scope="col"'
    assert head in render_table(Table("", ["a", "b"], []))
