"""SAVE_DIR/metrics.jsonl against a small training loop that calls fairseq's own trainer-side functions."""

import errno
import json
import os
import types

import pytest
from fairseq.data.iterators import CountingIterator
from fairseq.logging import metrics, progress_bar

from amos_fairseq.errors import UserError
from amos_fairseq.run import hooks, metrics_log


@pytest.fixture
def save_dir(tmp_path):
    return str(tmp_path)


def read(save_dir):
    with open(os.path.join(save_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(autouse=True)
def _only_metrics(monkeypatch):
    """The hooks of other topics are left out."""
    monkeypatch.setattr(hooks, "active", [])


def train(save_dir, first_update, last_update, log_interval=2, epoch=1, updates_per_epoch=10):
    """The calls of fairseq_cli.train in a process, with the real progress bar and synthetic statistics."""
    trainer = types.SimpleNamespace(get_num_updates=lambda: first_update - 1)
    cfg = types.SimpleNamespace(save_dir=save_dir, reset_meters=False)
    hooks.active[:] = [metrics_log.MetricsLog()]
    hooks.load_checkpoint(lambda cfg, trainer: ({}, "iterator"), cfg, trainer)
    place = (first_update - 1) % updates_per_epoch
    batches = CountingIterator(range(place, updates_per_epoch), start=place)
    common = {"log_format": "none", "log_interval": log_interval, "epoch": epoch, "aim_param_checkpoint_dir": save_dir}
    bar = progress_bar.progress_bar(batches, **common)
    for update, _ in enumerate(bar, start=first_update):
        if update % log_interval == 0:
            bar.log({"loss": 1.0 / update, "num_updates": update}, tag="train_inner", step=update)
        if update == last_update:
            break
    valid_bar = progress_bar.progress_bar(CountingIterator(range(3)), prefix="valid on 'valid' subset", **common)
    valid_bar.print({"loss": 2.0 / last_update}, tag="valid", step=last_update)
    bar.print({"loss": 9.0}, tag="train", step=last_update)


def test_lines_of_intervals_and_validations(save_dir):
    train(save_dir, first_update=1, last_update=6)
    assert read(save_dir) == [
        {"split": "train", "update": 2, "epoch": 0.2, "loss": 0.5},
        {"split": "train", "update": 4, "epoch": 0.4, "loss": 0.25},
        {"split": "train", "update": 6, "epoch": 0.6, "loss": 1 / 6},
        {"split": "valid", "update": 6, "epoch": 0.6, "loss": 2 / 6},
    ]


def test_the_time_of_a_resumed_process_is_logged(save_dir):
    """fairseq restores its stopwatch as it was saved: stopped."""
    metrics.load_state_dict({"default": [(20, "wall", "StopwatchMeter", {"sum": 0, "n": 0, "round": 0})]})
    try:
        assert metrics.get_meter("default", "wall").elapsed_time == 0
        train(save_dir, first_update=4, last_update=6)
        assert metrics.get_meter("default", "wall").elapsed_time > 0
    finally:
        metrics.reset_meters("default")


def test_full_disk_while_cutting_back_is_one_clear_line_and_keeps_the_file(save_dir, monkeypatch):
    train(save_dir, first_update=1, last_update=4)
    before = read(save_dir)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"metrics\.jsonl: metrics cannot be written \(No space left on device\)"):
        train(save_dir, first_update=3, last_update=4)
    assert read(save_dir) == before
    assert os.listdir(save_dir) == ["metrics.jsonl"]
