"""What a run prints: the time to its end."""

import logging
import logging.config
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.logging import metrics, progress_bar
from omegaconf import OmegaConf

from amos_fairseq.run import hooks, progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test sets itself."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def only_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks of other topics are left out."""
    monkeypatch.setattr(hooks, "active", [progress.Progress()])
    yield
    metrics.reset()


def train_epoch(clock: list[float], updates: int, seconds: float, first: Sequence[float], max_update: int) -> None:
    """What fairseq's ``train`` does: updates of ``seconds`` each but for the ``first`` ones; update n has the loss n."""
    done = [0]
    cfg = OmegaConf.create({"optimization": {"max_update": max_update, "max_epoch": 0}})
    trainer = SimpleNamespace(get_num_updates=lambda: done[0], cfg=cfg)

    def train(*arguments: Any) -> tuple[list[None], bool]:
        formats = {"log_format": "simple", "log_interval": 1000, "default_log_format": "tqdm"}
        for _ in progress_bar.progress_bar(range(updates), epoch=1, aim_param_checkpoint_dir="runs/a", **formats):
            clock[0] += first[done[0]] if done[0] < len(first) else seconds
            done[0] += 1
            with metrics.aggregate("train_inner"):
                metrics.log_scalar("loss", done[0])
        return [None], True

    hooks.train_epoch(train, cfg, trainer, None, SimpleNamespace(next_epoch_idx=1))


def test_the_time_of_the_run_is_told_after_twenty_measured_updates(clock, caplog) -> None:
    """Of 0.1 s each, the first estimate excepted, which sees the slow ones."""
    with caplog.at_level(logging.INFO):
        train_epoch(clock, updates=30, seconds=0.1, first=[3.0, 2.0, 2.0, 2.0, 2.0], max_update=10_022)
    assert caplog.messages == [
        "update 5 of 10,022: loss 3.000, 2 s per update, first estimate: 5 h 33 min to the end",
        # (3 x 2 + 17 x 0.1) / 20 seconds
        "update 22 of 10,022: loss 11.500, 0.38 s per update, about 1 h 4 min to the end",
    ]
