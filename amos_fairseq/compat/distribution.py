"""Which ranks train, on which devices, on a CPU as on GPUs.

What stock fairseq does, seen by running it:

- under torchrun on a CPU it divides by the number of GPUs, which is zero; with a world size of 1 (the default on a CPU,
  and with one GPU per node) it overlooks torchrun, and N processes train N models that overwrite one another;
- a world size above 1 on a CPU starts no process and exits 0;
- it takes the device from rank % GPUs, which is wrong where nodes differ, instead of torchrun's LOCAL_RANK;
- DistributedDataParallel gets a CUDA device for a model on the CPU and refuses it;
- gradients that differ between ranks are noticed on GPUs only;
- it does not say how many CPU cores a rank may use, which a scheduler can set to one by mistake;
- gradients exist twice, as tensors and as the buckets that are exchanged, and are copied back after the exchange.

What fairseq arranges by itself stays as it is: Slurm without torchrun, one process per GPU of one machine.
"""

import functools
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.trainer import Trainer
from torch.nn.parallel import DistributedDataParallel

from amos_fairseq.errors import UserError, report_user_errors

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # fairseq silences INFO on all ranks but the first; each rank has one line to say

TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# Launchers that start several copies of a command without saying so in torchrun's variables.
PROCESS_COUNTS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
# Of the larger of two norms. Ranks add the same numbers in the same order, so that they agree to the last bit.
GRADIENT_NORM_TOLERANCE = 1e-6


def arrange_ranks(cfg: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Fill in ``cfg.distributed_training`` before fairseq's ``call_main`` reads it.

    Args:
        cfg: fairseq's whole configuration.
        environment: of the process.
        num_gpus: GPUs that this process sees; 0 with ``--cpu``.

    Raises:
        UserError: the launch would train several models that overwrite one another, or none; or an exchange that loses
            what bf16 can hold.
    """
    training = cfg.distributed_training
    _check_exchange(cfg)
    if num_gpus == 0:
        training.distributed_backend = "gloo"
    if training.distributed_init_method is not None:
        if num_gpus == 0 and training.distributed_world_size > 1 and not training.distributed_no_spawn:
            raise UserError(
                _no_process(training.distributed_world_size) + ", or add --distributed-no-spawn to each rank"
            )
    elif all(variable in environment for variable in TORCHRUN_VARIABLES):
        _join_torchrun(training, environment, num_gpus)
    elif int(environment.get("WORLD_SIZE", 1)) > 1:
        missing = [variable for variable in TORCHRUN_VARIABLES if variable not in environment]
        raise UserError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is in the environment but {', '.join(missing)} is not, so that each "
            "process would train a model of its own: start it with torchrun, or unset WORLD_SIZE"
        )
    elif training.distributed_world_size == 1:
        _refuse_copies(environment)
    elif num_gpus == 0:
        raise UserError(_no_process(training.distributed_world_size))
    elif any(variable in environment for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")):
        _check_slurm(training, environment, num_gpus)
    else:
        _stay_on_this_machine(training, num_gpus)


def _check_exchange(cfg: Any) -> None:
    """Gradients are exchanged in the number format of the model, so under ``--bf16`` there is nothing to compress."""
    if cfg.common.bf16 and cfg.distributed_training.ddp_comm_hook == "fp16":
        raise UserError(
            "--ddp-comm-hook fp16 would squeeze the gradients of --bf16, which take 16 bits already, into the smaller range "
            "of fp16: leave it out (distributed_training.ddp_comm_hook=none)"
        )


def _join_torchrun(training: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Be the rank that torchrun has given this process, whatever world size was asked for."""
    rank = int(environment["RANK"])
    local_rank = int(environment.get("LOCAL_RANK", rank % max(num_gpus, 1)))
    if num_gpus > 0 and local_rank >= num_gpus:
        raise UserError(
            f"LOCAL_RANK={local_rank} but this machine has {num_gpus} GPUs to give: "
            f"start torchrun with --nproc-per-node {num_gpus} at most, or add --cpu"
        )
    training.distributed_init_method = "env://"
    training.distributed_world_size = int(environment["WORLD_SIZE"])
    training.distributed_rank = rank
    training.device_id = local_rank
    training.distributed_no_spawn = True


def _refuse_copies(environment: Mapping[str, str]) -> None:
    for launcher, variable in PROCESS_COUNTS.items():
        if int(environment.get(variable, 1)) > 1:
            raise UserError(
                f"{launcher} has started {environment[variable]} processes ({variable}) but --distributed-world-size is "
                "1: each would train a model of its own and overwrite the others'; start one torchrun on each node, or "
                "give the number of all GPUs as --distributed-world-size"
            )


def _check_slurm(training: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """What fairseq's own way through Slurm assumes and otherwise answers with an assertion or a CUDA error."""
    num_nodes = int(environment.get("SLURM_NNODES", 1))
    if num_nodes > 1 and training.distributed_port <= 0:
        raise UserError(
            f"{num_nodes} Slurm nodes need a port to meet at: give --distributed-port (distributed_training."
            "distributed_port), the same on all nodes, for example 29500"
        )
    num_tasks = int(environment.get("SLURM_NTASKS", num_nodes))
    if num_tasks > num_nodes and num_tasks != training.distributed_world_size:
        raise UserError(
            f"Slurm has {num_tasks} tasks but --distributed-world-size is {training.distributed_world_size}: give one "
            "task per GPU and their number as world size, or one task per node"
        )
    if num_tasks > num_nodes and int(environment.get("SLURM_LOCALID", 0)) >= num_gpus:
        raise UserError(
            f"SLURM_LOCALID={environment['SLURM_LOCALID']} but this task sees {num_gpus} GPUs: ask for GPUs by node "
            "(--gpus-per-node), not by task"
        )


def _stay_on_this_machine(training: Any, num_gpus: int) -> None:
    """One process per GPU, which fairseq starts itself."""
    if training.distributed_world_size > num_gpus:
        raise UserError(
            f"--distributed-world-size is {training.distributed_world_size} but this machine has {num_gpus} GPUs: "
            "start one torchrun on each node (examples/multi_node), or ask for fewer"
        )
    # With --distributed-port fairseq leaves this out and trains on one GPU, calling it many.
    distributed_utils._infer_single_node_init(training)


def _no_process(world_size: int) -> str:
    return (
        f"--distributed-world-size is {world_size}, but fairseq starts processes on GPUs only and would train nothing: "
        f"start it with 'torchrun --nproc-per-node {world_size} -m fairseq_cli.train ...'"
    )


def require_ranks(cfg: Any, environment: Mapping[str, str]) -> None:
    """Refuse to train alone where several ranks were meant; for runs whose launch this package did not see.

    Raises:
        UserError: a world size above 1, in the settings or from torchrun, but no process group.
    """
    world_size = max(cfg.distributed_training.distributed_world_size, int(environment.get("WORLD_SIZE", 1)))
    if world_size > 1 and not torch.distributed.is_initialized():
        raise UserError(
            f"{world_size} ranks were asked for but they are not connected, because the plugin was imported after fairseq "
            "had chosen the ranks: in a YAML of your own, keep the lines under hydra.callbacks of examples/pretraining"
        )


def describe_rank(environment: Mapping[str, str]) -> str:
    """Where this rank runs, and on how many CPU cores: too few starve its loader processes.

    The count is the affinity of the process. ``nproc`` would answer OMP_NUM_THREADS where that is smaller.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    place = f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} on {socket.gethostname()}"
    return f"{place}: {cores} CPUs, OMP_NUM_THREADS={environment.get('OMP_NUM_THREADS', 'not set')}"


def data_parallel_on_any_device(
    module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **settings: Any
) -> DistributedDataParallel:
    """DistributedDataParallel that asks for no GPU where the module is on the CPU, and keeps gradients in its buckets.

    ``--gradient-as-bucket-view`` is always on: the trainer forgets gradients after an update (``None``), which is all that
    views ask for. They save the memory of the gradients once, and the copy out of the buckets. A static graph is not
    promised: it may not change with the update, as AMOS' ``layer_switch`` does, and with every parameter used it saves nothing.
    """
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    settings["gradient_as_bucket_view"] = True
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **settings)


def check_gradient_norms(trainer: Trainer, grad_norm: torch.Tensor) -> None:
    """Stop where the gradients are not the same on all ranks after they were exchanged.

    A norm that is not finite on every rank passes: what follows in the trainer handles it.

    Raises:
        UserError: with the norm of each rank.
    """
    if trainer.data_parallel_world_size == 1:
        return
    norms = torch.zeros(trainer.data_parallel_world_size, dtype=torch.float64, device=trainer.device)
    norms[trainer.data_parallel_rank] = grad_norm
    distributed_utils.all_reduce(norms, group=trainer.data_parallel_process_group)
    norms = norms.cpu()
    if not torch.isfinite(norms).any():
        return
    if not torch.isfinite(norms).all() or norms.max() - norms.min() > GRADIENT_NORM_TOLERANCE * norms.max():
        listed = ", ".join(f"rank {rank}: {norm:.8g}" for rank, norm in enumerate(norms.tolist()))
        raise UserError(
            f"gradients differ between ranks in update {trainer.get_num_updates() + 1} (norms {listed}): the ranks do "
            "not run the same code, settings and kind of device; the last checkpoint is from before"
        )


def apply() -> None:
    """Patch what works on several ranks; :mod:`amos_fairseq.compat.launch` calls :func:`arrange_ranks`."""
    distributed_fairseq_model.DistributedDataParallel = data_parallel_on_any_device
    Trainer._check_grad_norms = check_gradient_norms
    make_trainer = Trainer.__init__

    @functools.wraps(make_trainer)
    def make_connected_trainer(self: Trainer, cfg: Any, *args: Any, **kwargs: Any) -> None:
        with report_user_errors():  # Hydra would print a traceback
            require_ranks(cfg, os.environ)
        if torch.distributed.is_initialized():
            logger.info(describe_rank(os.environ))
        make_trainer(self, cfg, *args, **kwargs)

    Trainer.__init__ = make_connected_trainer
