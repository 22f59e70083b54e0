"""Equal budgets: their numbers of updates, and the checkpoints at their shares."""

import budgets
import entries
import pytest
from budgets import Budget

from amos_fairseq.errors import UserError


def test_shares_of_the_thesis_are_whole_updates():
    """Table 5.3's 6.25 to 50 % of ELECTRA-Small's 1M updates."""
    assert [budgets.update_at(1_000_000, share) for share in budgets.SHARES] == [62500, 125000, 250000, 500000, 1000000]


def test_schedule_has_a_checkpoint_at_every_share():
    settings = budgets.schedule_settings(2400, 100)
    assert settings == {
        "optimization.max_update": 2400,
        "lr_scheduler.warmup_updates": 100,
        "checkpoint.save_interval_updates": 150,
        "checkpoint.keep_interval_updates": -1,
        "dataset.validate_interval_updates": 150,
        "common.log_interval": 50,
    }
    assert all(budgets.update_at(2400, share) % 150 == 0 for share in budgets.SHARES)


def test_updates_of_a_budget():
    def never() -> float:
        raise AssertionError("only a budget of minutes needs a timing")

    assert Budget("flops", 6e12).updates(2e9, never) == 3000
    assert Budget("updates", 3200).updates(2e9, never) == 3200
    assert Budget("minutes", 2).updates(2e9, lambda: 0.25) == 480


@pytest.mark.parametrize(
    ("wanted", "per_epoch", "expected"),
    [
        (1000, 5000, 992),  # 62 sixteenths are nearest
        (1010, 5000, 1008),
        (9, 5000, 16),
        (240, 60, 224),  # at 240, 25 % would be the end of the first epoch; 224 and 256 are as near
    ],
)
def test_nearest_number_of_updates_without_a_share_at_the_end_of_an_epoch(wanted, per_epoch, expected):
    assert budgets.divisible_updates(Budget("flops", 1.0), "mlm", wanted, per_epoch) == expected
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        assert (expected * share) % per_epoch != 0


@pytest.mark.parametrize(
    ("budget", "wanted", "per_epoch", "message"),
    [
        (Budget("updates", 1000), 1000, 5000, "--budget-updates 1,000 cannot be divided into sixteenths"),
        (Budget("updates", 240), 240, 60, "give 224"),
        (Budget("flops", 1e9), 3.0, 5000, "1e+09 FLOPs are 3.0 updates"),
        (Budget("flops", 1e9), 160, 2, "an epoch of this text is 2 updates"),
    ],
)
def test_indivisible_budgets_are_refused(budget, wanted, per_epoch, message):
    with pytest.raises(UserError, match=message.replace("+", r"\+")):
        budgets.divisible_updates(budget, "mlm", wanted, per_epoch)


def test_parsed_shares():
    assert budgets.parse_shares("1,0.25,0.250") == [0.25, 1.0]
    for wrong in ("0.3", "half", ""):
        with pytest.raises(UserError, match=r"give shares of the budget out of 0\.0625,0\.125,0\.25,0\.5,1"):
            budgets.parse_shares(wrong)


def test_updates_per_epoch_are_those_of_the_iterator(comparison_data):
    """Counted by iterating over the epoch: 79 blocks in batches of 6, two batches per update."""
    preset = entries.read_preset("tiny", {"dataset.batch_size": 6, "optimization.update_freq": [2]})
    (entry,) = entries.read_entries(entries.CONFIGS / "entries.yaml", "tiny", ["mlm"])
    cfg = entries.compose_entry(entry, {"task.data": str(comparison_data[0]), **preset.settings})
    from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

    task = TextPretrainingTask.setup_task(cfg.task)
    task.load_dataset("train")
    batches = list(task.get_batch_iterator(task.dataset("train"), max_sentences=6).next_epoch_itr())
    assert len(task.dataset("train")) == 79
    assert budgets.updates_per_epoch(cfg) == len(batches) // 2 == 6
