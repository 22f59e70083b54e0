"""Pretraining of one entry: progress, stored checkpoints, other settings, and time per update."""

import dataclasses

import entries
import pytest
import torch
from budgets import schedule_settings
from omegaconf import OmegaConf
from runs import Pretraining

from amos_fairseq.errors import UserError


@pytest.fixture
def pretraining(tmp_path) -> Pretraining:
    """AMOS for 32 updates, nothing trained yet."""
    (entry,) = entries.read_entries(entries.CONFIGS / "entries.yaml", "tiny", ["amos_uniform"])
    settings = {"task.data": "a, DATA", **entry.settings, **schedule_settings(32, 3)}
    return Pretraining(entry, entries.compose_entry(entry, settings), settings, tmp_path / "run", "cpu")


def save(run: Pretraining, name: str, updates: int, seconds: float = 0.0, **changed) -> None:
    """A checkpoint as far as its header is read; ``changed`` replaces settings of the model."""
    run.save_dir.mkdir(exist_ok=True)
    cfg = OmegaConf.to_container(run.cfg)
    # An older version of the package has no such setting, and knows one that is gone.
    cfg["model"] = {**cfg["model"], **changed, "setting_of_old": 1}
    del cfg["model"]["gumbel_temperature"]
    state = {"optimizer_history": [{"num_updates": updates}], "extra_state": {"previous_training_time": seconds}}
    torch.save(state | {"cfg": cfg}, run.save_dir / name)


def test_checkpoints_of_other_updates_than_the_shares_are_removed(pretraining):
    assert (pretraining.num_updates, pretraining.finished, pretraining.checkpoint(1.0)) == (0, False, None)
    for updates in range(2, 17, 2):
        save(pretraining, f"checkpoint_{1 if updates < 10 else 2}_{updates}.pt", updates, seconds=updates * 180.0)
    save(pretraining, "checkpoint_last.pt", 16)
    save(pretraining, "checkpoint_best.pt", 16)
    pretraining.prune()
    names = {"checkpoint_1_2.pt", "checkpoint_1_4.pt", "checkpoint_1_8.pt", "checkpoint_2_16.pt"}
    names |= {"checkpoint_last.pt", "checkpoint_best.pt"}
    assert {path.name for path in pretraining.save_dir.iterdir()} == names
    found = [pretraining.checkpoint(share).name for share in (0.0625, 0.5)]
    assert found == ["checkpoint_1_2.pt", "checkpoint_2_16.pt"]
    assert pretraining.hours(0.5) == pytest.approx(0.8)
    assert not pretraining.finished
    assert pretraining.checkpoint(1.0) is None
    save(pretraining, "checkpoint_last.pt", 32)
    assert pretraining.finished
    assert pretraining.checkpoint(1.0).name == "checkpoint_last.pt"


def test_run_of_other_settings_is_refused(pretraining):
    pretraining.check()
    save(pretraining, "checkpoint_last.pt", 8)
    pretraining.check()
    save(pretraining, "checkpoint_last.pt", 8, mixture="learned")
    with pytest.raises(UserError, match=r"was trained with model.mixture=learned, not uniform: give another OUT"):
        pretraining.check()
    other = dataclasses.replace(pretraining, cfg=OmegaConf.merge(pretraining.cfg, {"optimization": {"lr": [0.5]}}))
    save(pretraining, "checkpoint_last.pt", 8)
    with pytest.raises(UserError, match=r"optimization.lr=\[0.002\], not \[0.5\]"):
        other.check()
    other = dataclasses.replace(pretraining, cfg=OmegaConf.merge(pretraining.cfg, {"dataset": {"batch_size": 7}}))
    with pytest.raises(UserError, match=r"dataset.batch_size=128, not 7"):
        other.check()
