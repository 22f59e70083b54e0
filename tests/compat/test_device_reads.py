"""How often an update of two ranks synchronizes host and device (of one: tests/cuda), and the exact values that it reads."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fairseq.logging import metrics
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin
from fairseq.trainer import Trainer
from rank_functions import succeed_on_two_ranks
from synchronization import Synchronizations
from training_step import FairseqStep, random_batches, set_up

from amos_fairseq.compat.device_reads import NOT_READ_YET, on_host


def warm_step(precision: str, num_ranks: int = 1) -> tuple[FairseqStep, list[dict[str, Any]]]:
    """A trainer after its first update, which makes the optimizer's moments, and batches."""
    settings = {"precision": precision, "device": "cpu", "vocabulary_size": 600}
    # fp16 is refused on a CPU, but its operations are those of a GPU.
    with mock.patch("amos_fairseq.run.precision.choose", return_value=(precision, "")):
        setup = set_up("amos_tiny", ["dataset.batch_size=2"], **settings)
        setup.cfg.common.fp16_init_scale = 1  # no overflow, which would end in CUDA
        setup.cfg.distributed_training.distributed_world_size = num_ranks
        step, batches = FairseqStep(setup), random_batches(setup)
    step.step(batches[0])
    return step, batches


def save_synchronizations_of_rank(rank: int, directory: str) -> None:
    step, batches = warm_step("fp16", num_ranks=2)
    with Synchronizations(NOT_READ_YET) as calls, metrics.aggregate(new_root=True):
        step.trainer.train_step(batches[rank : rank + 2])
    assert step.trainer.get_num_updates() == 2
    Path(directory, f"{rank}.json").write_text(json.dumps(calls.places), encoding="utf-8")


@pytest.mark.slow
def test_two_ranks_synchronize_for_sample_size_and_norms_too(tmp_path: Path) -> None:
    """fairseq divides by the sample size if it is not 0; all_reduce_dict creates tensors of numbers on the host."""
    succeed_on_two_ranks(save_synchronizations_of_rank, tmp_path)
    expected = {"all_reduce_dict", "train_step", "check_gradient_norms", "fetch"}
    for rank in range(2):
        places = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        called = [place.split()[-1] for place in places]
        assert set(called) == expected
        # --fp16 fetches the norm of the gradient for its loss scale, and then the statistics.
        assert (called.count("train_step"), called.count("fetch")) == (1, 2)


@pytest.fixture
def stock_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("clip_grad_norm", "_check_grad_norms", "_reduce_and_log_stats")
    for owner, name in [*((Trainer, name) for name in names), (_FP16OptimizerMixin, "clip_grad_norm")]:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def test_logged_values_do_not_change(stock_reads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock first; one thread and the same seeds, so to the last digit that fairseq logs."""
    step, batches = warm_step("float32")
    with metrics.aggregate(new_root=True) as expected:
        stock = step.trainer.train_step(batches[:2])
    monkeypatch.undo()
    step, batches = warm_step("float32")
    with metrics.aggregate(new_root=True) as found:
        ours = step.trainer.train_step(batches[:2])
    assert ours == stock
    for key in ("gnorm", "clip"):
        assert found.get_smoothed_value(key) == pytest.approx(expected.get_smoothed_value(key), abs=1e-3)
        assert type(found[key].sum) is float


def test_counts_and_tensors_keep_values_and_types() -> None:
    """2^24 + 1 is no float32, which one tensor of all would have been without a wider type."""
    histogram = torch.arange(6, dtype=torch.float64).view(2, 3) + 2.0**40
    logs = [
        {"count": torch.tensor(2**24 + 1), "loss": torch.tensor(0.1), "ntokens": 7, "name": "text"},
        {"count": torch.tensor([3]), "half": torch.tensor(1.5).bfloat16(), "histogram": histogram, "nothing": None},
    ]
    with Synchronizations() as calls:
        first, second = on_host(logs)
    assert len(calls.places) == 1
    assert first == {"count": 2**24 + 1, "loss": float(torch.tensor(0.1)), "ntokens": 7, "name": "text"}
    assert type(first["count"]) is int
    assert second.pop("histogram").equal(histogram)
    assert second == {"count": 3, "half": 1.5, "nothing": None}
    assert on_host([{"ntokens": 3}]) == [{"ntokens": 3}]
    assert on_host([torch.tensor(0.5), torch.tensor(2**24 + 1)]) == [0.5, 2**24 + 1]  # nothing in float64 among them
