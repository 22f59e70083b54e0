"""Which ranks train, and on which devices, GPUs or a CPU; and collective operations, which every rank has to call.

Stock fairseq, as observed:

- Under torchrun on a CPU it divides by the number of GPUs, which is zero. With a world size of 1 (the default on a CPU, and
  with one GPU per node) it ignores torchrun, and N processes train N models that overwrite one another.
- A world size above 1 on a CPU starts no process and exits with code 0.
- It uses rank % GPUs as the device, which is wrong where nodes differ, instead of torchrun's LOCAL_RANK.
- It passes a CUDA device to DistributedDataParallel for a model on the CPU, which raises an error.
- It notices gradients that differ between ranks only on GPUs.
- It does not log how many CPU cores a rank may use, which a scheduler may limit to one by mistake.
- It stores gradients twice, as tensors and in the buckets that are exchanged, and copies them back after the exchange.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from amos_fairseq.compat.device_reads import true_norm
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.python_process import leave_out_current_folder

Value = TypeVar("Value")

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # fairseq silences INFO on all ranks but the first; each rank logs one line here

TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# Launchers that start several copies of a command without setting torchrun's variables.
PROCESS_COUNTS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
# What gloo and NCCL report if another rank has ended. Gloo sometimes misses the end of a rank to which it is sending, and
# waits for its timeout of 30 minutes.
CONNECTION_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited|communicator was aborted"
    r"|Timed out waiting \d+ms for (send|recv) operation"
)
# Relative to the larger of two norms. Ranks add the same numbers in the same order, so they agree to the last bit.
GRADIENT_NORM_TOLERANCE = 1e-6


def name_lost_ranks(error: RuntimeError) -> None:
    """Raise :class:`UserError` with the ranks that have ended, if ``error`` says that the connection to one is lost."""
    if not CONNECTION_LOST.search(str(error)) or not torch.distributed.is_initialized():
        return
    lost = find_lost_ranks()
    subject = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
    raise UserError(
        f"{subject} ended or cannot be reached: see the last lines of output there (without any, the process was "
        "killed, often because memory was full); start the same command again to continue from the last checkpoint"
    ) from error


def find_lost_ranks() -> list[int]:
    """Return the ranks that have ended. To be called on each rank on which a collective operation has failed.

    Each such rank reports to the store; the lost ones have not done so after ten seconds. Without torchrun the store is in the
    first rank: where it cannot be reached, that rank is lost.
    """
    rank, ranks = torch.distributed.get_rank(), range(torch.distributed.get_world_size())
    store = torch.distributed.distributed_c10d._get_default_store()
    end, silent = time.monotonic() + 10.0, [0]
    try:
        store.set(f"amos_fairseq/failed/{rank}", "")
        while True:
            silent = [other for other in ranks if not store.check([f"amos_fairseq/failed/{other}"])]
            if not silent or time.monotonic() > end:
                return silent or [other for other in ranks if other != rank]
            time.sleep(0.1)
    except RuntimeError:  # the store has ended, perhaps only after all ranks have reported to it
        return silent or [0]


def visible_gpus(cfg: Any) -> int:
    """Return the number of GPUs that this process may use; 0 with ``--cpu``."""
    return 0 if cfg.common.cpu else torch.cuda.device_count()


def arrange_ranks(cfg: Any, environment: Mapping[str, str] = os.environ, num_gpus: int | None = None) -> None:
    """Complete ``cfg.distributed_training`` before fairseq's ``call_main`` uses it.

    A launch is refused if it would train no model, or several that overwrite one another.
    """
    leave_out_current_folder()  # of the ranks that fairseq starts, one for each GPU
    if num_gpus is None:
        num_gpus = visible_gpus(cfg)
    training, world_size = cfg.distributed_training, cfg.distributed_training.distributed_world_size
    nothing_starts = (
        f"--distributed-world-size is {world_size}, but fairseq starts processes on GPUs only and would train nothing: "
        f"start it with 'torchrun --nproc-per-node {world_size} -m fairseq_cli.train ...'"
    )
    if num_gpus == 0:
        training.distributed_backend = "gloo"
    if training.distributed_init_method is not None:
        if num_gpus == 0 and world_size > 1 and not training.distributed_no_spawn:
            raise UserError(f"{nothing_starts}, or add --distributed-no-spawn to each rank")
    elif all(variable in environment for variable in TORCHRUN_VARIABLES):
        _join_torchrun(training, environment, num_gpus)
    elif int(environment.get("WORLD_SIZE", 1)) > 1:
        missing = [variable for variable in TORCHRUN_VARIABLES if variable not in environment]
        raise UserError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is in the environment but {', '.join(missing)} is not, so that each "
            "process would train a model of its own: start it with torchrun, or unset WORLD_SIZE"
        )
    elif world_size == 1:
        for launcher, variable in PROCESS_COUNTS.items():
            if int(environment.get(variable, 1)) > 1:
                raise UserError(
                    f"{launcher} has started {environment[variable]} processes ({variable}) but --distributed-world-size is "
                    "1: each would train a model of its own and overwrite the others'; start one torchrun on each node, or "
                    "give the number of all GPUs as --distributed-world-size"
                )
    elif num_gpus == 0:
        raise UserError(nothing_starts)
    elif any(variable in environment for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")):
        _check_slurm(training, environment, num_gpus)
    elif world_size > num_gpus:
        raise UserError(
            f"--distributed-world-size is {world_size} but this machine has {num_gpus} GPUs: start one torchrun on each node "
            "(examples/multi_node), or request fewer"
        )
    else:
        # fairseq starts one process per GPU. With --distributed-port it skips this call and trains on one, reporting several.
        distributed_utils._infer_single_node_init(training)


def _join_torchrun(training: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Use the rank that torchrun has assigned to this process, regardless of the world size in the settings."""
    rank = int(environment["RANK"])
    local_rank = int(environment.get("LOCAL_RANK", rank % max(num_gpus, 1)))
    if num_gpus > 0 and local_rank >= num_gpus:
        raise UserError(f"LOCAL_RANK={local_rank} but there are {num_gpus} GPUs: start as many ranks, or add --cpu")
    training.distributed_init_method = "env://"
    training.distributed_world_size = int(environment["WORLD_SIZE"])
    training.distributed_rank = rank
    training.device_id = local_rank
    training.distributed_no_spawn = True


def _check_slurm(training: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Check what fairseq's own Slurm launch assumes; otherwise it fails with an assertion or a CUDA error."""
    num_nodes = int(environment.get("SLURM_NNODES", 1))
    num_tasks = int(environment.get("SLURM_NTASKS", num_nodes))
    if num_nodes > 1 and training.distributed_port <= 0:
        raise UserError(
            f"{num_nodes} Slurm nodes need a common port: give --distributed-port (distributed_training.distributed_port), "
            "the same on all nodes, such as 29500"
        )
    if num_tasks > num_nodes and num_tasks != training.distributed_world_size:
        raise UserError(
            f"Slurm has {num_tasks} tasks but --distributed-world-size is {training.distributed_world_size}: give one "
            "task per GPU and their number as world size, or one task per node"
        )
    if num_tasks > num_nodes and int(environment.get("SLURM_LOCALID", 0)) >= num_gpus:
        raise UserError(
            f"SLURM_LOCALID={environment['SLURM_LOCALID']} but this task sees {num_gpus} GPUs: request GPUs by node "
            "(--gpus-per-node), not by task"
        )


def check_connection(cfg: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to train ranks that are not connected; log where each rank runs, and on how many CPU cores.

    With too few cores its loader processes are slow. The count is the affinity of the process: ``nproc`` would print
    OMP_NUM_THREADS where that is smaller.
    """
    if torch.distributed.is_initialized():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        place = f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} on {socket.gethostname()}"
        logger.info(f"{place}: {cores} CPUs, OMP_NUM_THREADS={environment.get('OMP_NUM_THREADS', 'not set')}")
        return
    world_size = max(cfg.distributed_training.distributed_world_size, int(environment.get("WORLD_SIZE", 1)))
    if world_size > 1:
        with report_user_errors():  # Hydra would print a traceback
            raise UserError(
                f"{world_size} ranks were requested but they are not connected, because the plugin was imported after fairseq "
                "had chosen the ranks: in a YAML of your own, keep hydra.callbacks of a packaged recipe (amos_base.yaml)"
            )


def data_parallel_on_any_device(
    stock: Callable[..., Any],
    module: torch.nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    **settings: Any,
) -> DistributedDataParallel:
    """Create DistributedDataParallel without a GPU for a module on the CPU, and with gradients that are views of its buckets.

    The views save the memory of all gradients and the copy out of the buckets. They require that gradients are set to None
    after an update, as fairseq's trainer does.
    """
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    settings["gradient_as_bucket_view"] = True
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **settings)


def check_gradient_norms(stock: Any, trainer: Trainer, grad_norm: torch.Tensor) -> None:
    """End the run if the gradients differ between ranks after they were exchanged; fairseq compares them on GPUs only.

    If no rank has a finite norm, that is handled later (:mod:`amos_fairseq.run.health`).
    """
    if trainer.data_parallel_world_size == 1:
        return
    norms = torch.zeros(trainer.data_parallel_world_size, dtype=torch.float64, device=trainer.device)
    norms[trainer.data_parallel_rank] = true_norm(grad_norm)
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


def from_first_rank(read: Callable[[], Value]) -> Value:
    """Return on every rank what ``read`` returns on the first one, which must be picklable.

    If ``read`` raises, so does the first rank; the others raise ``SystemExit`` with the same exit code, so that the message is
    printed once.
    """
    is_first = distributed_utils.get_global_rank() == 0
    value, error = None, None
    if is_first:
        try:
            value = read()
        except Exception as raised:
            error = raised
    if distributed_utils.get_global_world_size() > 1:
        # Some exceptions cannot be pickled; the other ranks need only the exit code.
        shared = [(value, None if error is None else getattr(error, "exit_code", 1))]
        torch.distributed.broadcast_object_list(shared, src=0)
        value, exit_code = shared[0]
        if exit_code is not None and not is_first:
            raise SystemExit(exit_code)
    if error is not None:
        raise error
    return value


def raise_on_every_rank(problem: str | None, error_class: type[UserError] = UserError) -> None:
    """End all ranks if the first rank has a ``problem``, a message for the user; the class determines the exit code."""

    def report() -> None:
        if problem is not None:
            raise error_class(problem)

    from_first_rank(report)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over all ranks, on the CPU. Every rank has to pass the same shape and dtype."""
    if distributed_utils.get_global_world_size() == 1:
        return values
    on_device = values.to("cuda" if torch.distributed.get_backend() == "nccl" else "cpu", copy=True)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()
