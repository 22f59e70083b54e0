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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from amos_fairseq.compat.device_reads import true_norm
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.process import leave_out_current_folder

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


def explain_lost_connection(error: RuntimeError) -> None:
    """Raise :class:`UserError` if ``error`` says that the connection to another rank is lost."""
    if CONNECTION_LOST.search(str(error)) and torch.distributed.is_initialized():
        raise UserError(
            "another rank has ended or cannot be reached: see its last lines of output (without any, the process was "
            "killed, often because memory was full); start the same command again to continue from the last checkpoint"
        ) from error


def visible_gpus(cfg: Any) -> int:
    """Return the number of GPUs that this process may use; 0 with ``--cpu``."""
    return 0 if cfg.common.cpu else torch.cuda.device_count()


def arrange_ranks(cfg: Any, environment: Mapping[str, str] = os.environ, num_gpus: int | None = None) -> None:
    """Complete ``cfg.distributed_training`` before fairseq's ``call_main`` uses it.

    A launch is refused if it would train no model, or several that overwrite one another. ``num_gpus``: that this process may
    use; None: those of the machine.
    """
    leave_out_current_folder()  # of the ranks that fairseq starts, one for each GPU
    if num_gpus is None:
        num_gpus = visible_gpus(cfg)
    training = cfg.distributed_training
    if num_gpus == 0:
        training.distributed_backend = "gloo"
    is_arranged = training.distributed_init_method is not None
    if not is_arranged and all(variable in environment for variable in TORCHRUN_VARIABLES):
        _join_torchrun(training, environment, num_gpus)
        is_arranged = True
    is_slurm = any(variable in environment for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    _refuse_launch(training, environment, num_gpus, is_arranged, is_slurm)
    if not is_arranged and not is_slurm and training.distributed_world_size > 1:
        # fairseq starts one process per GPU. With --distributed-port it skips this call and trains on one, reporting several.
        distributed_utils._infer_single_node_init(training)


def _join_torchrun(training: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Use the rank that torchrun has assigned to this process, regardless of the world size in the settings."""
    rank = int(environment["RANK"])
    training.distributed_init_method = "env://"
    training.distributed_world_size = int(environment["WORLD_SIZE"])
    training.distributed_rank = rank
    training.device_id = int(environment.get("LOCAL_RANK", rank % max(num_gpus, 1)))
    training.distributed_no_spawn = True


def _refuse_launch(
    training: Any, environment: Mapping[str, str], num_gpus: int, is_arranged: bool, is_slurm: bool
) -> None:
    """Raise :class:`UserError` for a launch that stock fairseq would accept in silence, or that asks for too many GPUs."""
    world_size = training.distributed_world_size
    launchers = [name for name, variable in PROCESS_COUNTS.items() if int(environment.get(variable, 1)) > 1]
    refused = [
        (
            num_gpus == 0 and world_size > 1 and not (is_arranged and training.distributed_no_spawn),
            f"--distributed-world-size is {world_size}, but fairseq starts processes on GPUs only and would train nothing: "
            f"start it with 'torchrun --nproc-per-node {world_size} -m fairseq_cli.train ...'",
        ),
        (
            not is_arranged and int(environment.get("WORLD_SIZE", 1)) > 1,
            "WORLD_SIZE is in the environment without torchrun's other variables, so that each process would train a model "
            "of its own: start it with torchrun, or unset WORLD_SIZE",
        ),
        (
            not is_arranged and world_size == 1 and launchers,
            f"{' '.join(launchers)} has started several processes but --distributed-world-size is 1: each would train a model "
            "of its own and overwrite the others'; start one torchrun on each node, or give the number of all GPUs as "
            "--distributed-world-size",
        ),
        (
            num_gpus > 0 and (training.device_id if is_arranged else 0 if is_slurm else world_size - 1) >= num_gpus,
            f"more ranks are asked for than the {num_gpus} GPUs here: start one torchrun on each node (examples/multi_node) "
            "with as many ranks as it has GPUs, or add --cpu",
        ),
    ]
    for is_refused, message in refused:
        if is_refused:
            raise UserError(message)


def check_connection(cfg: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to train ranks that are not connected; log where each rank runs, and the affinity of its process: on too few CPU
    cores its loader processes are slow."""
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
    They must be set to None after an update, as fairseq's trainer does."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    settings["gradient_as_bucket_view"] = True
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **settings)


def check_gradient_norms(stock: Any, trainer: Trainer, grad_norm: torch.Tensor) -> None:
    """End the run if the gradients differ between ranks after they were exchanged; :mod:`amos_fairseq.run.health` ends one in
    which no rank has a finite norm."""
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
    """Return on every rank what ``read`` returns on the first one, which must be picklable. If it raises, the other ranks raise
    ``SystemExit`` with the same exit code, so that the message is printed once."""
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
