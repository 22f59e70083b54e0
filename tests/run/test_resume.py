"""Starts that are refused, that do nothing, and that continue."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)
from fairseq.optim.sgd import SGD
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run.resume import checkpoint_to_load, finished, is_unfinished, refusal


def trainer_at(updates: int, max_update: int, total: int, warmup: int = 2, max_epoch: int = 0) -> Any:
    """A trainer whose learning rate is that of fairseq's own polynomial decay after ``updates``."""
    config = PolynomialDecayLRScheduleConfig(warmup_updates=warmup, total_num_update=total, lr=[0.1])
    sgd = OmegaConf.create({"lr": [0.1], "momentum": 0.0, "weight_decay": 0.0})
    scheduler = PolynomialDecayLRSchedule(config, SGD(sgd, [torch.nn.Parameter(torch.zeros(1))]))
    learning_rate = scheduler.step_update(updates)
    return SimpleNamespace(
        get_num_updates=lambda: updates,
        get_lr=lambda: learning_rate,
        get_model=lambda: torch.nn.Linear(1, 1),
        cfg=OmegaConf.create({"optimization": {"max_update": max_update, "max_epoch": max_epoch}}),
    )


def test_a_learning_rate_of_zero_is_refused_with_the_flags_to_use() -> None:
    problem = refusal(trainer_at(100, max_update=200, total=100), "checkpoint_last.pt")
    assert problem.startswith("after update 100 the learning rate is 0")
    for flag in ("--total-num-update", "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"):
        assert flag in problem


def test_a_continued_run_without_updates_left_is_refused() -> None:
    problem = refusal(trainer_at(100, max_update=100, total=100), "old/checkpoint_last.pt")
    assert "--restore-file old/checkpoint_last.pt is at update 100" in problem
    assert "--reset-lr-scheduler" in problem


@pytest.mark.parametrize(
    ("updates", "max_update", "total"), [(0, 100, 100), (50, 100, 100), (99, 100, 100), (100, 200, 200), (100, 0, 200)]
)
def test_other_runs_continue(updates: int, max_update: int, total: int) -> None:
    """Among them the first update of a warm-up, whose learning rate is 0 as well."""
    trainer = trainer_at(updates, max_update, total)
    assert (trainer.get_lr() == 0) == (updates == 0)
    for restore_file in ("checkpoint_last.pt", "elsewhere.pt"):
        assert refusal(trainer, restore_file) is None
    assert finished(trainer, SimpleNamespace(next_epoch_idx=9)) is None


def test_a_run_is_finished_by_updates_or_epochs() -> None:
    at_end = trainer_at(100, max_update=100, total=100, max_epoch=3)
    assert finished(at_end, SimpleNamespace(next_epoch_idx=1)) == "100 updates of --max-update 100"
    assert refusal(at_end, "checkpoint_last.pt") is None
    assert not is_unfinished(at_end, SimpleNamespace(next_epoch_idx=1))
    early = trainer_at(50, max_update=100, total=100, max_epoch=3)
    assert finished(early, SimpleNamespace(next_epoch_idx=3)) is None
    assert is_unfinished(early, SimpleNamespace(next_epoch_idx=3))
    assert finished(early, SimpleNamespace(next_epoch_idx=4)) == "3 epochs of --max-epoch 3"


def test_an_optimizer_of_other_weights_is_refused() -> None:
    """Adam's moments are kept by their place, so that new weights would get those of others."""
    trainer = trainer_at(50, max_update=100, total=100)
    trainer.get_model = lambda: SimpleNamespace(
        newly_initialized=["cross_views.heads.upos.backward_view.output.weight"]
    )
    problem = refusal(trainer, "checkpoint_last.pt")
    assert problem.startswith("the checkpoint of update 50 lacks weights of this run, such as cross_views.heads.")
    assert "output.weight (1 in all), " in problem
    assert "--views" in problem


def checkpoint_config(tmp_path: Path, **changes: Any) -> Any:
    defaults = {"save_dir": str(tmp_path), "restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    return OmegaConf.create({**defaults, **changes})


def test_the_file_that_is_loaded(tmp_path: Path) -> None:
    old, last = tmp_path / "elsewhere" / "old.pt", tmp_path / "checkpoint_last.pt"
    old.parent.mkdir()
    old.touch()
    assert checkpoint_to_load(checkpoint_config(tmp_path)) is None
    assert checkpoint_to_load(checkpoint_config(tmp_path, finetune_from_model=str(old))) == str(old)
    assert checkpoint_to_load(checkpoint_config(tmp_path, restore_file=str(old))) == str(old)
    last.touch()
    assert checkpoint_to_load(checkpoint_config(tmp_path, finetune_from_model=str(old))) == str(last)


def test_a_start_from_elsewhere_does_not_overwrite_the_run_that_it_made(tmp_path: Path) -> None:
    elsewhere, step_back = tmp_path / "old" / "checkpoint_last.pt", tmp_path / "run" / "checkpoint_1_5.pt"
    for path in (elsewhere, step_back, tmp_path / "run" / "checkpoint_last.pt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(UserError, match=r"would start again and overwrite .*--finetune-from-model"):
        checkpoint_to_load(checkpoint_config(tmp_path / "run", restore_file=str(elsewhere)))
    assert checkpoint_to_load(checkpoint_config(tmp_path / "run", restore_file=str(step_back))) == str(step_back)


@pytest.mark.parametrize("flag", ["restore_file", "finetune_from_model"])
def test_a_missing_file_is_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} gone.pt does not exist"):
        checkpoint_to_load(checkpoint_config(tmp_path, **{flag: "gone.pt"}))
