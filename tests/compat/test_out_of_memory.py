"""A batch that does not fit: the run ends, where stock fairseq would leave it out and never make an update."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.trainer import Trainer
from torch import nn

import amos_fairseq  # noqa: F401


def trainer_whose_memory_is_full() -> Any:
    """What ``Trainer.train_step`` touches up to the end of the forward pass, on one rank."""

    def train_step(**arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    criterion = nn.Identity()
    cfg = SimpleNamespace(
        ema=SimpleNamespace(store_ema=False), distributed_training=SimpleNamespace(distributed_world_size=1)
    )
    return SimpleNamespace(
        cfg=cfg,
        model=nn.Identity(),
        criterion=criterion,
        get_criterion=lambda: criterion,
        optimizer=None,
        task=SimpleNamespace(train_step=train_step),
        data_parallel_world_size=1,
        cuda=False,
        get_num_updates=lambda: 0,
        zero_grad=lambda: None,
        _set_seed=lambda: None,
        _prepare_sample=lambda sample: (sample, False),
        _log_oom=lambda error: None,
    )


def test_the_run_ends() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Trainer.train_step(trainer_whose_memory_is_full(), [{}])


def test_stock_fairseq_skips_the_batch() -> None:
    assert inspect.unwrap(Trainer.train_step)(trainer_whose_memory_is_full(), [{}]) is None
