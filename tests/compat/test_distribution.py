"""The ranks of a launch on machines with any number of GPUs, launches that are refused, and two connected ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from failures import error_line
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf
from rank_functions import succeed_on_two_ranks

from amos_fairseq.compat import distribution
from amos_fairseq.compat.distribution import arrange_ranks, check_connection, from_first_rank, raise_on_every_rank
from amos_fairseq.errors import COLLAPSED, CollapsedError, UserError


def torchrun_environment(rank: int, world_size: int, **more: str) -> dict[str, str]:
    return {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": str(world_size), "RANK": str(rank)} | more


def settings(**values):
    """fairseq's own configuration; the default world size of this machine does not enter."""
    cfg = OmegaConf.structured(FairseqConfig)
    values = {"distributed_world_size": 1, "device_id": 0} | values
    for name, value in values.items():
        cfg.distributed_training[name] = value
    return cfg


@pytest.mark.parametrize(
    ("num_gpus", "rank", "local_rank", "backend"), [(0, 3, "1", "gloo"), (4, 3, "3", "nccl"), (8, 9, None, "nccl")]
)
def test_torchrun_on_cpu_and_gpus(num_gpus: int, rank: int, local_rank: str | None, backend: str) -> None:
    """Stock divides by zero GPUs, ignores torchrun at world size 1, and derives the device from the global rank."""
    cfg = settings()
    environment = torchrun_environment(rank, 16)
    if local_rank is not None:
        environment["LOCAL_RANK"] = local_rank
    arrange_ranks(cfg, environment, num_gpus)
    training = cfg.distributed_training
    assert (training.distributed_world_size, training.distributed_rank) == (16, rank)
    assert training.device_id == (int(local_rank) if local_rank else rank % num_gpus)
    assert training.distributed_init_method == "env://"
    assert training.distributed_no_spawn
    assert training.distributed_backend == backend


NODES = {"SLURM_JOB_NODELIST": "node[0-7]", "SLURM_NNODES": "8"}


@pytest.mark.parametrize(
    ("values", "environment", "num_gpus", "message"),
    [
        ({"distributed_world_size": 2}, {}, 0, r"starts processes on GPUs only .* 'torchrun --nproc-per-node 2 -m"),
        ({"distributed_world_size": 4}, {}, 2, r"more ranks are asked for than the 2 GPUs here"),
        ({}, {"WORLD_SIZE": "4", "RANK": "1"}, 8, r"WORLD_SIZE is in the environment without torchrun's"),
        ({}, {"SLURM_STEP_NUM_TASKS": "3"}, 0, r"srun has started several processes .* overwrite the others'"),
        ({}, torchrun_environment(3, 4, LOCAL_RANK="3"), 2, r"more ranks are asked for than the 2 GPUs here"),
    ],
)
def test_invalid_launches_are_refused(values, environment, num_gpus, message) -> None:
    with pytest.raises(UserError, match=message):
        arrange_ranks(settings(**values), environment, num_gpus)


def test_launches_that_fairseq_handles_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process; one per GPU of this machine; Slurm with its own numbers."""
    cfg = settings()
    arrange_ranks(cfg, {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, num_gpus=0)
    assert cfg.distributed_training.distributed_init_method is None
    assert cfg.distributed_training.distributed_world_size == 1

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cfg = settings(distributed_world_size=4, distributed_port=29511)
    arrange_ranks(cfg, {}, num_gpus=4)
    assert cfg.distributed_training.distributed_init_method == "tcp://localhost:29511"
    assert not cfg.distributed_training.distributed_no_spawn

    slurm = NODES | {"SLURM_LOCALID": "7"}
    for tasks in ("8", "64"):  # one per node, which spawns a rank for each GPU; one per GPU
        cfg = settings(distributed_world_size=64, distributed_port=29500)
        arrange_ranks(cfg, slurm | {"SLURM_NTASKS": tasks, "SLURM_STEP_NUM_TASKS": tasks}, num_gpus=8)
    assert cfg.distributed_training.distributed_init_method is None

    cfg = settings(distributed_world_size=2, distributed_init_method="tcp://a:1", distributed_no_spawn=True)
    arrange_ranks(cfg, {}, num_gpus=0)
    assert cfg.distributed_training.distributed_backend == "gloo"


def test_unconnected_ranks_are_refused(capsys: pytest.CaptureFixture) -> None:
    check_connection(settings(), {})
    for cfg, environment in ((settings(distributed_world_size=2), {}), (settings(), {"WORLD_SIZE": "2"})):
        line = error_line(capsys, lambda _, cfg=cfg, environment=environment: check_connection(cfg, environment))
        assert "2 ranks were requested but they are not connected" in line


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (1.5, 1.5 + 1e-7, None),
        (float("nan"), float("nan"), None),
        (1.5, 1.50001, r"differ between ranks in update 42 \(norms rank 0: 1.5, rank 1: 1.50001\)"),
        (1.5, float("nan"), r"rank 1: nan"),
    ],
)
def test_gradients_that_differ_stop_the_run(mine, other, message, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_rank_adds(norms: torch.Tensor, group: object) -> None:
        norms[1] = other

    monkeypatch.setattr(distribution.distributed_utils, "all_reduce", other_rank_adds)
    trainer = SimpleNamespace(device=torch.device("cpu"), get_num_updates=lambda: 41, data_parallel_process_group=None)
    trainer.data_parallel_world_size, trainer.data_parallel_rank = 2, 0
    with pytest.raises(UserError, match=message) if message else nullcontext():
        distribution.check_gradient_norms(None, trainer, torch.tensor(mine, dtype=torch.float64))


class CannotBePickled(OSError):
    """As exceptions of libraries that hold a lock or a file."""

    def __reduce__(self) -> None:
        raise TypeError("cannot pickle")


def fail(rank: int, error: Exception) -> None:
    """The action of the first rank; the others must not call it."""
    assert rank == 0
    raise error


def every_way_to_end(rank: int) -> None:
    """After each error both ranks still meet in the next operation: none is a step behind."""
    errors = (UserError("no such file"), CollapsedError("flat"), CannotBePickled("gone"), ValueError("a bug"))
    for number, error in enumerate(errors):
        with pytest.raises(SystemExit if rank else type(error)) as ended:
            from_first_rank(lambda error=error: fail(rank, error))
        if rank:
            assert ended.value.code == (COLLAPSED if number == 1 else 1)
        else:
            assert ended.value is error
        assert from_first_rank(lambda number=number: (rank, number)) == (0, number)
    with pytest.raises(SystemExit if rank else CollapsedError) as ended:
        raise_on_every_rank(None if rank else "flat", CollapsedError)
    assert rank == 0 or ended.value.code == COLLAPSED
    raise_on_every_rank("only rank 1 found this" if rank else None)


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_both() -> None:
    succeed_on_two_ranks(every_way_to_end)


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7563", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)", False),
    ],
)
def test_the_error_of_a_lost_connection_is_one_line(message: str, is_lost: bool, monkeypatch) -> None:
    """Messages of gloo."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match=r"^another rank has ended") if is_lost else nullcontext():
        distribution.explain_lost_connection(RuntimeError(message))
