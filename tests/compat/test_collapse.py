"""When equal logits count as a collapsed discriminator, and a run that ends because of it."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interrupted_run import num_updates

from amos_fairseq.compat.collapse import EqualLogits, is_count
from amos_fairseq.errors import COLLAPSED
from amos_fairseq.metrics_file import read_records


def count_of(aucs: list[float], logit_std: float = 0.0) -> EqualLogits:
    seen = EqualLogits()
    for auc in aucs:
        seen = seen.after(auc, logit_std)
    return seen


def noisy_aucs(mean: float, count: int = 400) -> list[float]:
    """500 replaced and 3,500 original tokens: the standard error of an area is 0.014."""
    draw = random.Random(2)
    return [round(draw.gauss(mean, 0.014), 4) for _ in range(count)]


@pytest.mark.parametrize(
    ("aucs", "knows_nothing"),
    [
        ([0.5] * 50, True),
        (noisy_aucs(0.5), True),
        (noisy_aucs(0.51), False),
        (noisy_aucs(0.49), False),
        ([0.51] * 50, False),
    ],
    ids=["ties", "noise", "small logits in order", "in reverse order", "the same small order"],
)
def test_areas_within_their_noise(aucs: list[float], knows_nothing: bool) -> None:
    seen = count_of(aucs)
    assert seen.count == len(aucs)
    assert seen.knows_nothing is knows_nothing


def test_only_equal_logits_in_a_row_count() -> None:
    assert count_of([0.5] * 9, logit_std=0.02).count == 0
    assert count_of([0.5] * 9, logit_std=math.nan).count == 0
    assert count_of([0.5] * 9).after(0.5, 0.3) == EqualLogits()
    assert count_of([0.5] * 9).after(math.nan, 0.0) == count_of([0.5] * 9)


@pytest.mark.parametrize(
    "saved", [None, 3, [1, 2.0], [1, 2.0, 3.0, 4.0], [-1, 0.0, 0.0], [1.5, 0.0, 0.0], [1, "x", 0.0]]
)
def test_counts_of_strangers_are_ignored(saved: object) -> None:
    assert not is_count(saved)


@pytest.mark.slow
def test_a_collapsed_run_warns_and_ends(run_training: Callable, tmp_path: Path) -> None:
    """Linear layers that are 0, and a rate at which they stay so, give all tokens one probability."""
    dead = ["--linear-init-std", "0", "--lr", "1e-9", "--collapse-updates", "6", "--log-interval", "1"]
    first = run_training(tmp_path, *dead, "--max-update", "4", "--save-interval-updates", "2")
    assert "same probability" not in first.stdout + first.stderr
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["extra_state"]["equal_logit_updates"]
    assert saved[0] == 4
    ended = run_training(tmp_path, *dead, "--max-update", "30", check=False)  # counts on from 4
    assert ended.returncode == COLLAPSED, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    assert re.match(r"amos_fairseq: error: update 12: detection .* for 12 updates \(AUC 0\.5", line), line
    assert "docs/collapse.md" in line
    assert "update 6: detection has given all tokens the same probability for 6 updates" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert num_updates(tmp_path) == 4
    logged = [record["rtd_logit_std"] for record in read_records(tmp_path)]
    assert len(logged) >= 4
    assert max(logged) < 0.01
    off = run_training(tmp_path, *dead, "--max-update", "14", "--collapse-updates", "0")
    assert "same probability" not in off.stdout + off.stderr
