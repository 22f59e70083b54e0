"""``--deterministic``: what it sets on a GPU, that a CPU is left alone, and the cumulative sums that replace PyTorch's."""

import os
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from amos_fairseq.functional.sampling import running_sums
from amos_fairseq.run.kernels import WORKSPACE_VARIABLE, Determinism, Memory


def configuration(deterministic: bool):
    content = {"common": {"cpu": False}, "model": {"deterministic": deterministic}}
    return OmegaConf.create(content | {"distributed_training": {"distributed_rank": 0}})


@pytest.mark.parametrize(
    ("asked", "gpus", "before", "after"),
    [(True, 1, "", ":4096:8"), (True, 1, ":16:8", ":16:8"), (False, 1, "", ""), (True, 0, "", "")],
)
def test_only_the_flag_on_a_gpu_changes_the_process(
    asked, gpus, before, after, monkeypatch, restored_determinism
) -> None:
    """The environment may choose another workspace that is deterministic."""
    applies = bool(after)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv(WORKSPACE_VARIABLE, before)
    Determinism().before_trainer(configuration(asked))
    assert torch.are_deterministic_algorithms_enabled() is applies
    assert torch.utils.deterministic.fill_uninitialized_memory is not applies
    assert os.environ[WORKSPACE_VARIABLE] == after


@pytest.mark.parametrize("width", [1, 2, 3000])
def test_sums_of_integers_are_cumulative_sums(width: int, restored_determinism: None) -> None:
    """Each entry is rounded by at most half of 2^-52 of the whole sum; an entry of 0 adds exactly nothing."""
    torch.manual_seed(width)
    values = torch.rand(5, width, dtype=torch.float64).log().mul(-8).exp()  # over many orders of magnitude
    values[:, ::3] = 0.0
    values[:, -1] = 1.0
    expected = running_sums(values)
    assert torch.equal(expected, values.cumsum(-1))
    torch.use_deterministic_algorithms(True)
    sums = running_sums(values)
    assert ((sums - expected).abs() <= (width + 1) * 2**-52 * expected[:, -1:]).all()
    steps = sums.diff(dim=-1, prepend=torch.zeros(5, 1, dtype=torch.float64))
    assert (steps >= 0).all()
    assert (steps[values == 0] == 0).all()


def test_free_memory_is_logged_once_for_each_line_of_the_log() -> None:
    """fairseq logs it in the updates in which its trainer knows the GPU."""
    hook, gpu = Memory(), object()
    trainer = SimpleNamespace(cuda_env=gpu, cfg=OmegaConf.create({"common": {"log_interval": 3}}))
    hook.after_trainer(trainer)
    logged = []
    for done in range(7):
        trainer.get_num_updates = lambda done=done: done
        hook.before_update(trainer)
        logged.append(trainer.cuda_env is gpu)
    assert logged == [False, False, True, False, False, True, False]
