"""Entries and presets: composed configurations have the given settings and differ in the objective only."""

import entries
import pytest
from budgets import schedule_settings
from entries import CONFIGS

from amos_fairseq.errors import UserError

ENTRIES = CONFIGS / "entries.yaml"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def composed(size: str, name: str, updates: int = 2400, **settings):
    preset = entries.read_preset(size, settings)
    (entry,) = entries.read_entries(ENTRIES, size, [name])
    schedule = schedule_settings(updates, preset.warmup(updates))
    return entries.compose_entry(entry, {"task.data": "DATA", **preset.settings, **entry.settings, **schedule})


@pytest.mark.slow
def test_all_entries_share_everything_but_the_objective():
    size = "small"
    names = ["mlm", "electra", "electra_mlm", "teams", "electric", "amos", "amos_uniform", "amos_random_layer"]
    assert [entry.name for entry in entries.read_entries(ENTRIES, size, None)] == names
    configs = {name: composed(size, name) for name in names}
    shared = entries.check_shared(configs)
    assert {"model.embedding_dim", "model.relative_position_scheme", "optimizer.adam_betas"} < set(shared)
    assert "common.seed" in shared
    objectives = ["mlm", "electra", "electra", "teams", "electric", "amos", "amos", "amos"]
    assert [cfg.model._name for cfg in configs.values()] == objectives
    assert [configs[name].model.mixture for name in names[5:]] == ["learned", "uniform", "random_layer"]
    assert [configs[name].model.encoder_mlm_weight for name in names[1:3]] == [0.0, 1.0]
    assert len({cfg.optimization.max_update for cfg in configs.values()}) == 1


@pytest.mark.parametrize(
    ("size", "updates", "expected"),
    [("tiny", 1600, 100), ("tiny", 16, 1), ("small", 1_000_000, 10_000), ("mini", 16_000, 500), ("mini", 1600, 400)],
)
def test_warmup(size: str, updates: int, expected: int):
    assert entries.read_preset(size, {}).warmup(updates) == expected


def test_different_setting_is_refused_by_name():
    configs = {"mlm": composed("tiny", "mlm"), "amos": composed("tiny", "amos", **{"model.dropout": 0.2})}
    with pytest.raises(UserError, match=r"model.dropout is 0.0 for mlm and 0.2 for amos: .*--set model.dropout=VALUE"):
        entries.check_shared(configs)
