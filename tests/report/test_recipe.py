"""The comparison with the paper's recipe, on packaged recipes with known changes."""

import pytest

from amos_fairseq.composition import compose_recipe
from amos_fairseq.report.page import Page, render_page, render_table
from amos_fairseq.report.recipe import compare_settings, paper_recipe, shown, sources
from amos_fairseq.report.runs import PretrainingCost, PretrainingRun
from amos_fairseq.report.sections import recipe_section
from amos_fairseq.tables import Table


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amos_base", "electra_small", "electric_base", "mlm_base", "teams_large"])
def test_a_paper_recipe_differs_nowhere_from_itself(name, tmp_path):
    cfg = compose_recipe(name)
    assert paper_recipe(cfg) == name
    batch = cfg.dataset.batch_size * cfg.optimization.update_freq[0]
    settings = compare_settings(cfg, name, batch)
    assert not [setting for setting in settings if setting.differs]
    (first, *_) = settings
    assert first.own == str(batch)
    assert first.is_of_paper
    cost = PretrainingCost(1, tokens_per_update=batch * cfg.task.tokens_per_sample)
    section = recipe_section([PretrainingRun(tmp_path, "run", cost, cfg=cfg)])
    assert section.notes[0] == f"run: no setting differs from {name}."
    assert section.notes[0] in render_page(Page("", "", [section], []), {})


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
