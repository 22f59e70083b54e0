"""Updates that are not finite, in each precision, or do not fit into memory; losses that diverge; collapsed discriminators."""

import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failures import refusal
from fairseq.logging import metrics
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.trainer import Trainer
from forked_command import run_module
from interrupted_run import checkpoint, killed_at, num_updates
from omegaconf import OmegaConf
from tiny_runs import TINY_RUN

from amos_fairseq.errors import COLLAPSED, DIVERGED, UserError
from amos_fairseq.run import hooks
from amos_fairseq.run.health import Collapse, Divergence, FiniteUpdates
from amos_fairseq.run.metrics_file import read_records

NAN, INF = float("nan"), float("inf")


class Optimizer:
    """fp16's loss scaler as fairseq's FP16Optimizer uses it, or none; the gradient norm is given."""

    def __init__(self, grad_norm: float, scaler: Any = None) -> None:
        self.grad_norm, self.scaler = torch.tensor(grad_norm), scaler

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> torch.Tensor:
        if self.scaler is not None:
            self.scaler.check_overflow(self.grad_norm)
        return self.grad_norm


@pytest.fixture(autouse=True)
def finite_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only hook that is active."""
    monkeypatch.setattr(hooks, "active", [FiniteUpdates()])


def trainer(optimizer: Any, loss: float) -> Any:
    hooks.active[0].outputs = outputs_of(loss)  # as under --fp16
    return SimpleNamespace(
        optimizer=optimizer,
        is_fsdp=False,
        cfg=OmegaConf.create({"optimization": {"clip_norm": 2.0}}),
        task=SimpleNamespace(reduce_metrics=lambda outputs, criterion: metrics.log_scalar("loss", 0.0)),
        get_criterion=lambda: None,
        tpu=False,
        get_num_updates=lambda: 11,
    )


def outputs_of(loss: float) -> list[dict[str, Any]]:
    return [{"loss": torch.tensor(loss), "mlm_loss_8": torch.tensor(loss)}]


def update(made: Any, loss: float) -> dict[str, Any]:
    """The calls of fairseq's trainer with the gradient's norm in an update; returns the logged values."""
    norm = Trainer.clip_grad_norm(made, 2.0)
    assert torch.isfinite(norm)  # fairseq looks at it before the optimizer's step
    with metrics.aggregate(new_root=True) as logged:
        Trainer._reduce_and_log_stats(made, outputs_of(loss), 1.0, norm)
    return logged.get_smoothed_values()


def test_float32_and_bf16_stop_in_the_same_update() -> None:
    """Behind the optimizer's step, which the trainer has counted; at an infinite loss with a finite gradient, too."""
    with pytest.raises(UserError, match=r"update 11: the gradient is not finite \(mlm_loss_8 = nan; no loss scale\)"):
        update(trainer(Optimizer(NAN), NAN), NAN)
    after = trainer(Optimizer(1.5), 3.0)
    hook = FiniteUpdates()
    hook.after_update(after, {"loss": 3.0, "mlm_loss_8": 2.0})
    hook.after_update(after, None)  # fp16 has skipped the update
    with pytest.raises(UserError, match=r"update 11: the loss is not finite \(mlm_loss_8 = inf; no loss scale\)"):
        hook.after_update(after, {"loss": INF, "mlm_loss_8": INF})


def test_fp16_lowers_its_scale_first() -> None:
    scaler = DynamicLossScaler(init_scale=4.0, min_loss_scale=0.5)
    failing = trainer(Optimizer(INF, scaler), 3.0)
    scales = []
    for _ in range(2):
        with pytest.raises(OverflowError):  # fairseq's own: the update is skipped
            Trainer.clip_grad_norm(failing, 2.0)
        scales.append(scaler.loss_scale)
    assert scales == [2.0, 1.0]
    with pytest.raises(UserError, match=r"Minimum loss scale reached \(0\.5\).*every loss is finite; loss scale 1\)"):
        Trainer.clip_grad_norm(failing, 2.0)


def first_stop(losses: list[float], norms: list[float] | None = None, factor: float = 3.0) -> int | None:
    """Number of the update, from 1, at which a run with these losses ends."""
    test = Divergence()
    updates = zip(losses, norms or [1.0] * len(losses), strict=True)
    return next((number for number, (loss, norm) in enumerate(updates, 1) if test.diverges(loss, norm, factor)), None)


def noisy(values: list[float], spread: float = 0.2) -> list[float]:
    draw = random.Random(3)
    return [value * draw.uniform(1 - spread, 1 + spread) for value in values]


LEARNING = [10.4 * 0.99**update + 2 for update in range(400)]


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        (noisy(LEARNING), None),
        (noisy(LEARNING), noisy([1.02**update for update in range(400)], 0.5)),
        ([loss * (500 if update % 50 < Divergence.PATIENCE - 1 else 1) for update, loss in enumerate(LEARNING)], None),
        ([0.02 * 1.01**update for update in range(400)], None),  # an adversary that wins slowly
        ([1e9] * (Divergence.MINIMUM - 1) + [1e-9], None),
    ],
    ids=["learning", "a growing norm", "spikes", "a slow rise", "a bad start"],
)
def test_healthy_runs_go_on(losses: list[float], norms: list[float] | None) -> None:
    assert first_stop(losses, norms) is None


def test_a_diverging_run_ends_after_ten_updates() -> None:
    losses = noisy(LEARNING)
    assert first_stop(losses[:240] + [47_557.0] * 50) == 240 + Divergence.PATIENCE
    assert first_stop(losses[:240] + [3.2 * max(losses[200:240])] * 50) == 240 + Divergence.PATIENCE
    assert first_stop(losses, [1.0] * 300 + [31.0] * 100) == 300 + Divergence.PATIENCE
    assert first_stop(losses[:240] + [47_557.0] * 50, factor=0) is None


def train(data: Path, save_dir: Path, *flags: str) -> subprocess.CompletedProcess:
    return run_module("fairseq_cli.train", [str(data), *TINY_RUN, "--save-dir", str(save_dir), *flags])


@pytest.mark.slow
def test_a_run_continued_with_a_mad_learning_rate_keeps_its_checkpoints(
    binarized_corpus: Path, uninterrupted: Callable, tmp_path: Path
) -> None:
    """The last checkpoint before outlives a rotation that keeps one of every two updates."""
    run = killed_at(30, uninterrupted(), tmp_path / "run")
    flags = ["--save-interval-updates", "2", "--keep-interval-updates", "1", "--max-update", "60", "--lr", "50"]
    line = refusal(train(binarized_corpus, run, *flags), DIVERGED)
    # The first updates may still be healthy.
    diverged = re.match(r"update (\d+): the run diverges \(loss ", line)
    assert diverged, line
    assert 30 + Divergence.PATIENCE <= int(diverged.group(1)) <= 33 + Divergence.PATIENCE
    assert num_updates(run) == 30
    assert len(checkpoint(run)["extra_state"]["recent_updates"]) == 30


def trainer_with(patience: int) -> SimpleNamespace:
    task = SimpleNamespace(cfg=SimpleNamespace(collapse_updates=patience))
    trainer = SimpleNamespace(task=task, is_data_parallel_master=True, updates=0)
    trainer.get_num_updates, trainer.collapse = lambda: trainer.updates, Collapse()
    return trainer


@pytest.mark.parametrize(
    ("updates", "reset", "expected"), [(9, False, [4, [[2.0, 1.0]]]), (0, False, [0, []]), (9, True, [0, []])]
)
def test_what_a_checkpoint_has_is_continued_where_the_run_continues(updates: int, reset: bool, expected: list) -> None:
    trainer, saved = trainer_with(3), {Collapse.STATE: 4, Divergence.STATE: [[2.0, 1.0]]}
    trainer.updates, state, divergence = updates, {"extra_state": {}}, Divergence()
    for hook in (trainer.collapse, divergence):
        hook.after_load(SimpleNamespace(reset_meters=reset), trainer, None, saved)
        hook.before_save(trainer, state)
    assert list(state["extra_state"].values()) == expected


@pytest.mark.slow
def test_a_collapsed_run_warns_and_ends(binarized_corpus: Path, tmp_path: Path) -> None:
    """Linear layers that are 0, and a rate at which they stay so, give all tokens one probability."""
    dead = ["--linear-init-std", "0", "--lr", "1e-9", "--collapse-updates", "6", "--max-update", "30"]
    ended = train(binarized_corpus, tmp_path, *dead, "--save-interval-updates", "4")
    assert checkpoint(tmp_path, "checkpoint_1_4.pt")["extra_state"]["equal_logit_updates"] == 4
    line = refusal(ended, COLLAPSED)
    assert re.match(r"update 12: detection .* for 12 updates; ", line), line
    assert "docs/collapse.md" in line
    assert "update 6: detection has given all tokens the same probability for 6 updates" in ended.stdout + ended.stderr
    assert num_updates(tmp_path) == 8
    logged = [record["rtd_logit_std"] for record in read_records(tmp_path)]
    assert len(logged) >= 8
    assert max(logged) < 0.01
