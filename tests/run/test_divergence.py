"""Losses of healthy and of diverging runs, and a run that is continued with a learning rate of 50."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from failures import refusal
from interrupted_run import num_updates

from amos_fairseq.errors import DIVERGED
from amos_fairseq.run.divergence import MINIMUM, PATIENCE, WINDOW, DivergenceTest


def first_stop(losses: list[float], norms: list[float] | None = None, factor: float = 3.0) -> int | None:
    """Number of the update, from 1, at which a run with these losses ends."""
    test = DivergenceTest(factor)
    updates = zip(losses, norms or [1.0] * len(losses), strict=True)
    return next((number for number, (loss, norm) in enumerate(updates, 1) if test.diverges(loss, norm)), None)


def noisy(values: list[float], spread: float = 0.2) -> list[float]:
    draw = random.Random(3)
    return [value * draw.uniform(1 - spread, 1 + spread) for value in values]


LEARNING = [10.4 * 0.99**update + 2 for update in range(400)]


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        (noisy(LEARNING), None),
        (noisy(LEARNING), noisy([1.02**update for update in range(400)], 0.5)),
        ([loss * (500 if update % 50 < PATIENCE - 1 else 1) for update, loss in enumerate(LEARNING)], None),
        ([0.02 * 1.01**update for update in range(400)], None),  # an adversary that wins slowly
        ([1e9] * (MINIMUM - 1) + [1e-9], None),
    ],
    ids=["learning", "a growing norm", "spikes", "a slow rise", "a bad start"],
)
def test_healthy_runs_go_on(losses: list[float], norms: list[float] | None) -> None:
    assert first_stop(losses, norms or [1.0] * len(losses)) is None


def test_a_diverging_run_ends_after_ten_updates() -> None:
    losses = noisy(LEARNING)
    assert first_stop(losses[:240] + [47_557.0] * 50) == 240 + PATIENCE
    assert first_stop(losses[:240] + [3.2 * max(losses[200:240])] * 50) == 240 + PATIENCE
    assert first_stop(losses, [1.0] * 300 + [31.0] * 100) == 300 + PATIENCE
    assert first_stop(losses[:240] + [47_557.0] * 50, factor=0) is None


def test_the_window_is_that_of_the_updates_before() -> None:
    test = DivergenceTest(3.0, [[2.0, 1.0]] * 500)
    assert len(test.recent) == WINDOW
    assert [test.diverges(7.0, 1.0) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert list(test.recent) == [[2.0, 1.0]] * WINDOW


@pytest.mark.slow
def test_a_run_continued_with_a_mad_learning_rate_keeps_its_checkpoints(run_training: Callable, tmp_path: Path) -> None:
    """The checkpoint after 30 updates outlives a rotation that keeps one of every two updates."""
    schedule = ["--save-interval-updates", "2", "--keep-interval-updates", "1"]
    run_training(tmp_path, *schedule, "--max-update", "30")
    ended = run_training(tmp_path, *schedule, "--max-update", "60", "--lr", "50", check=False)
    line = refusal(ended, DIVERGED)
    # The first updates may still be healthy.
    found = re.match(r"update (\d+): the run diverges \(loss ", line)
    assert found, line
    assert 30 + PATIENCE <= int(found.group(1)) <= 33 + PATIENCE
    assert num_updates(tmp_path) == 30
    recent = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]["recent_updates"]
    assert len(recent) == 30
    again = run_training(tmp_path, *schedule, "--max-update", "36")
    assert "@ 30 updates" in again.stdout + again.stderr
    off = run_training(tmp_path, *schedule, "--max-update", "60", "--lr", "50", "--divergence-factor", "0", check=False)
    assert off.returncode != DIVERGED
