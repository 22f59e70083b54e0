"""When equal logits count as a collapsed discriminator, and a run that ends because of it."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from failures import refusal
from interrupted_run import num_updates

from amos_fairseq.errors import COLLAPSED, CollapsedError
from amos_fairseq.run import hooks
from amos_fairseq.run.collapse import STATE, load_count, save_count, watch_discriminator
from amos_fairseq.run.metrics_file import read_records


def trainer_with(patience: int, is_master: bool = True) -> SimpleNamespace:
    task = SimpleNamespace(cfg=SimpleNamespace(collapse_updates=patience))
    trainer = SimpleNamespace(task=task, is_data_parallel_master=is_master, updates=0)
    trainer.get_num_updates = lambda: trainer.updates
    return trainer


def update(trainer: SimpleNamespace, logit_std: float, auc: float = 0.5) -> None:
    trainer.updates += 1
    watch_discriminator(trainer, {"rtd_logit_std": logit_std, "rtd_auc": auc})


def test_one_warning_then_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The warning is not repeated at updates that say nothing, and updates before it do not count twice."""
    trainer = trainer_with(3)
    for logit_std, auc in [(0.0, 0.5), (0.0, 0.5), (0.02, 0.5), (0.0, 0.5), (0.009, 0.6), (0.0, 0.5), (0.0, math.nan)]:
        update(trainer, logit_std, auc)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "update 6: detection has given all tokens the same probability for 3 updates"
    ]
    update(trainer, 0.0)
    update(trainer, 0.0)
    with pytest.raises(CollapsedError, match=r"update 10: .* for 6 updates"):
        update(trainer, 0.0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("logit_std", [0.011, math.nan])
def test_other_logits_start_the_count_again(logit_std: float) -> None:
    trainer = trainer_with(3)
    for each in [0.0, 0.0, logit_std] * 5:
        update(trainer, each)
    assert trainer.equal_logit_updates == 0


def test_only_the_first_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_with(1, is_master=False)
    update(trainer, 0.0)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("saved", "updates", "reset", "expected"),
    [(4, 9, False, 4), (4, 0, False, 0), (4, 9, True, 0)]
    + [(other, 9, False, 0) for other in (None, -1, 1.5, "x", [4], True)],
)
def test_the_count_of_a_checkpoint(saved: object, updates: int, reset: bool, expected: int) -> None:
    """It is continued where the run continues; what is no count, in a stranger's checkpoint, is ignored."""
    trainer = trainer_with(3)
    trainer.updates = updates
    load_count(SimpleNamespace(reset_meters=reset), trainer, None, {STATE: saved})
    state = {"extra_state": {}}
    save_count(trainer, state)
    assert state == {"extra_state": {STATE: expected}}
    assert save_count in hooks.HOOKS["state_to_save"]


@pytest.mark.slow
def test_a_collapsed_run_warns_and_ends(run_training: Callable, tmp_path: Path) -> None:
    """Linear layers that are 0, and a rate at which they stay so, give all tokens one probability."""
    dead = ["--linear-init-std", "0", "--lr", "1e-9", "--collapse-updates", "6", "--log-interval", "1"]
    first = run_training(tmp_path, *dead, "--max-update", "4", "--save-interval-updates", "2")
    assert "same probability" not in first.stdout + first.stderr
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]["equal_logit_updates"]
    assert saved == 4
    ended = run_training(tmp_path, *dead, "--max-update", "30", check=False)  # counts on from 4
    line = refusal(ended, COLLAPSED)
    assert re.match(r"update 12: detection .* for 12 updates; ", line), line
    assert "docs/collapse.md" in line
    assert "update 6: detection has given all tokens the same probability for 6 updates" in ended.stdout + ended.stderr
    assert num_updates(tmp_path) == 4
    logged = [record["rtd_logit_std"] for record in read_records(tmp_path)]
    assert len(logged) >= 4
    assert max(logged) < 0.01
    off = run_training(tmp_path, *dead, "--max-update", "14", "--collapse-updates", "0")
    assert "same probability" not in off.stdout + off.stderr
