"""The progress of a run: its first line, the time to the end, and the bar on a terminal."""

import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.logging import progress_bar
from omegaconf import OmegaConf

from amos_fairseq.run import hooks, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test sets itself."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def only_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks of other topics are left out."""
    for moment, called in hooks.HOOKS.items():
        mine = tuple(hook for hook in called if hook.__module__ == progress.__name__)
        monkeypatch.setitem(hooks.HOOKS, moment, mine)
    yield
    progress._runs.clear()


def settings(**changes: Any) -> Any:
    cfg = {
        "checkpoint": {"save_dir": "runs/a", "save_interval_updates": 400, "save_interval": 10**9, "no_save": False},
        "optimization": {"max_update": 1750, "max_epoch": 0, "update_freq": [2]},
        "dataset": {"batch_size": 16},
        "task": {"tokens_per_sample": 64, "save_interval_minutes": 30.0},
        "distributed_training": {"distributed_world_size": 4, "distributed_rank": 0},
    }
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}={value}" for key, value in changes.items()]))


BATCH = "128 sequences x 64 = 8,192 tokens, on 4 ranks"
EPOCHS = f"3 epochs of {BATCH}; no checkpoints"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"1,750 updates of {BATCH}; a checkpoint every 400 updates and every 30 minutes"),
        (
            {"dataset.batch_size": "null", "task.save_interval_minutes": 0},
            "1,750 updates; a checkpoint every 400 updates",
        ),
        ({"optimization.max_update": 0, "optimization.max_epoch": 3, "checkpoint.no_save": True}, EPOCHS),
        ({"optimization.max_update": 0}, None),  # fairseq-validate
    ],
)
def test_first_line(changes: dict, line: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        progress.announce(settings(**changes))
    assert caplog.messages == ([] if line is None else [f"runs/a: {line}"])


DURATIONS = {0: "0 s", 59.6: "1 min 0 s", 3599: "59 min 59 s", 7800: "2 h 10 min", 90000: "1 d 1 h", 86400: "1 d 0 h"}


def test_duration() -> None:
    assert {seconds: progress.duration(seconds) for seconds in DURATIONS} == DURATIONS


def epoch(
    clock: list[float], updates: int, seconds: float, log_format: str | None = "simple", log_interval: int = 3
) -> None:
    """What fairseq's ``train`` does in an epoch of a run of ten updates, of ``seconds`` each."""
    done = [0]
    trainer = SimpleNamespace(get_num_updates=lambda: done[0])

    def train(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> tuple[list[None], bool]:
        formats = {"log_format": log_format, "log_interval": log_interval, "default_log_format": "tqdm"}
        bar = progress_bar.progress_bar(range(updates), epoch=1, aim_param_checkpoint_dir="runs/a", **formats)
        for _ in bar:
            clock[0] += seconds
            done[0] += 1
            if done[0] % log_interval == 0:
                bar.log({"loss": 2.5, "tokens_per_second": 21_300.0}, tag="train_inner", step=done[0])
        return [None], True

    cfg = settings(**{"optimization.max_update": 10})
    trainer.cfg = cfg
    hooks.train_epoch(train, cfg, trainer, None, SimpleNamespace(next_epoch_idx=1))


def test_lines_tell_the_time_to_the_end(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=9, seconds=40.0)
    lines = [message for message in caplog.messages if "left=" in message or "about" in message]
    # Two updates without a line take more than a minute.
    assert [line.partition("tokens_per_second=21300, ")[2] or line for line in lines] == [
        "update 2 of 10: 40 s per update, about 5 min 20 s to the end",
        "left=4 min 40 s",
        "update 5 of 10: 40 s per update, about 3 min 20 s to the end",
        "left=2 min 40 s",
        "update 8 of 10: 40 s per update, about 1 min 20 s to the end",
        "left=40 s",
    ]


def test_fast_run_tells_its_rate_once_before_the_first_interval(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=9, seconds=0.01, log_interval=100)
    assert caplog.messages == ["update 3 of 10: 100 updates/s, about 0 s to the end"]


def test_bar_of_the_whole_run_on_a_terminal(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with caplog.at_level(logging.INFO):
        epoch(clock, updates=9, seconds=40.0, log_format=None)
    assert caplog.messages == []
    last = terminal.getvalue().replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert " 9/10 " in last
    assert "21,300 tokens/s, loss 2.500" in last
