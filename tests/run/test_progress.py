"""The time to its end that a run prints; SAVE_DIR/metrics.jsonl against a small loop that calls fairseq's own functions."""

import errno
import logging
import logging.config
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.data.iterators import CountingIterator
from fairseq.logging import metrics, progress_bar
from interrupted_run import records
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run import hooks, progress


@pytest.fixture(autouse=True)
def only_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks of other topics are left out."""
    monkeypatch.setattr(hooks, "active", [progress.Progress()])
    yield
    metrics.reset()


def test_the_time_of_the_run_is_told_after_twenty_measured_updates(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fairseq's ``train`` does: 30 updates of 0.1 s each but for the first ones; update n has the loss n. Epochs end the
    run before max_update does."""
    cfg = OmegaConf.create({"optimization": {"max_update": 20_000, "max_epoch": 1}})
    trainer, now = SimpleNamespace(get_num_updates=lambda: trainer.updates, cfg=cfg, updates=0), [0.0]
    trainer.planned_updates = 10_022
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def train(*arguments: Any) -> tuple[list[None], bool]:
        formats = {"log_format": "simple", "log_interval": 1000, "default_log_format": "tqdm"}
        durations = [3.0, 2.0, 2.0, 2.0, 2.0] + 25 * [0.1]
        for seconds in progress_bar.progress_bar(durations, epoch=1, aim_param_checkpoint_dir="runs/a", **formats):
            now[0] += seconds
            trainer.updates += 1
            with metrics.aggregate("train_inner"):
                metrics.log_scalar("loss", trainer.updates)
        return [None], True

    with caplog.at_level(logging.INFO):
        hooks.train_epoch(train, cfg, trainer, SimpleNamespace(cfg={}), SimpleNamespace(next_epoch_idx=1))
    assert caplog.messages == [
        # (3 x 2 + 17 x 0.1) / 20 seconds
        "update 22 of 10,022: loss 11.500, 0.38 s per update, about 1 h 4 min to the end",
    ]


def train(save_dir, first_update, last_update, log_interval=2, epoch=1, updates_per_epoch=10):
    """The calls of fairseq_cli.train in a process, with the real progress bar and synthetic statistics."""
    trainer = SimpleNamespace(get_num_updates=lambda: first_update - 1)
    cfg = SimpleNamespace(save_dir=str(save_dir), reset_meters=False)
    hooks.active[:] = [progress.MetricsLog()]
    hooks.load_checkpoint(lambda cfg, trainer: ({}, "iterator"), cfg, trainer)
    place = (first_update - 1) % updates_per_epoch
    batches = CountingIterator(range(place, updates_per_epoch), start=place)
    common = {
        "log_format": "none",
        "log_interval": log_interval,
        "epoch": epoch,
        "aim_param_checkpoint_dir": cfg.save_dir,
    }
    bar = progress_bar.progress_bar(batches, **common)
    for update, _ in enumerate(bar, start=first_update):
        if update % log_interval == 0:
            bar.log({"loss": 1.0 / update, "num_updates": update}, tag="train_inner", step=update)
        if update == last_update:
            break
    valid_bar = progress_bar.progress_bar(CountingIterator(range(3)), prefix="valid on 'valid' subset", **common)
    valid_bar.print({"loss": 2.0 / last_update}, tag="valid", step=last_update)
    bar.print({"loss": 9.0}, tag="train", step=last_update)


def test_lines_of_intervals_and_validations(tmp_path):
    train(tmp_path, first_update=1, last_update=6)
    assert records(tmp_path) == [
        {"split": "train", "update": 2, "epoch": 0.2, "loss": 0.5},
        {"split": "train", "update": 4, "epoch": 0.4, "loss": 0.25},
        {"split": "train", "update": 6, "epoch": 0.6, "loss": 1 / 6},
        {"split": "valid", "update": 6, "epoch": 0.6, "loss": 2 / 6},
    ]


def test_the_time_of_a_resumed_process_is_logged(tmp_path):
    """fairseq restores its stopwatch as it was saved: stopped."""
    metrics.load_state_dict({"default": [(20, "wall", "StopwatchMeter", {"sum": 0, "n": 0, "round": 0})]})
    try:
        assert metrics.get_meter("default", "wall").elapsed_time == 0
        train(tmp_path, first_update=4, last_update=6)
        assert metrics.get_meter("default", "wall").elapsed_time > 0
    finally:
        metrics.reset_meters("default")


def test_full_disk_while_cutting_back_is_one_clear_line_and_keeps_the_file(tmp_path, monkeypatch):
    train(tmp_path, first_update=1, last_update=4)
    before = records(tmp_path)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"metrics\.jsonl: metrics cannot be written \(No space left on device\)"):
        train(tmp_path, first_update=3, last_update=4)
    assert records(tmp_path) == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
