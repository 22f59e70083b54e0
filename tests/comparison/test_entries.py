"""Entries and presets: composed configurations have the given settings and differ in the objective only."""

import entries
import pytest
from budgets import schedule_settings
from entries import CONFIGS, Entry

from amos_fairseq.errors import UserError

ENTRIES = CONFIGS / "entries.yaml"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def composed(size: str, name: str, updates: int = 2400, **settings):
    preset = entries.read_preset(size, settings)
    (entry,) = entries.read_entries(ENTRIES, size, [name])
    schedule = schedule_settings(updates, preset.warmup(updates))
    return entries.compose_entry(entry, {"task.data": "DATA", **preset.settings, **entry.settings, **schedule})


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
def test_all_entries_share_everything_but_the_objective(size: str):
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


def test_settings_with_special_characters():
    cfg = composed("tiny", "mlm", **{"task.data": 'a "b", c=d\\e', "optimization.lr": [0.5, 1e-7], "common.cpu": True})
    assert cfg.task.data == 'a "b", c=d\\e'
    assert list(cfg.optimization.lr) == [0.5, 1e-7]
    assert cfg.common.cpu is True
    assert cfg.lr_scheduler.total_num_update == 2400


@pytest.mark.parametrize(
    ("text", "expected"),
    [("common.seed=2", 2), ("optimization.lr=[0.1]", [0.1]), ("task.data=a b", "a b"), ("model.x=", None)],
)
def test_set_is_read_as_yaml(text, expected):
    assert entries.parse_setting(text) == (text.partition("=")[0], expected)


def test_different_setting_is_refused_by_name():
    configs = {"mlm": composed("tiny", "mlm"), "amos": composed("tiny", "amos", **{"model.dropout": 0.2})}
    with pytest.raises(UserError, match=r"model.dropout is 0.0 for mlm and 0.2 for amos: .*--set model.dropout=VALUE"):
        entries.check_shared(configs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- mlm", "is not a mapping"),
        ("{", "is not valid YAML"),
        ("../x: {config: mlm_tiny}", "is not a valid folder name"),
        ("x: {config: no_such}", "has no no_such.yaml"),
        ("x: mlm_tiny", "needs 'config: NAME'"),
        ("x: {config: mlm_tiny, seed: 1}", "has seed; it may have config, label and settings"),
        ("y: {config: mlm_tiny}", "--objectives x: no such entry"),
        (None, "cannot be read"),
    ],
)
def test_invalid_lists_of_entries_are_refused(tmp_path, content, message):
    file = tmp_path / "own.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        entries.read_entries(file, "tiny", ["x"] if content and content.startswith("y") else None)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_unknown_settings_name_the_entry():
    with pytest.raises(UserError, match=r"^mine: .*no_such"):
        entries.compose_entry(Entry("mine", "Mine", "mlm_tiny"), {"model.no_such": 1, "task.data": "DATA"})


@pytest.mark.parametrize("text", ["dropout=0.1", "model.dropout", "model.dropout=[", "=1"])
def test_set_needs_a_key_and_a_value(text):
    with pytest.raises(UserError, match="--set"):
        entries.parse_setting(text)
