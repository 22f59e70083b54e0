"""``--deterministic``, ``--compile`` and ``--kernels triton`` are set up and tested before training starts; memory on a CPU."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from amos_fairseq.compat.distribution import visible_gpus
from amos_fairseq.errors import UserError
from amos_fairseq.functional.attention import HALF_PRECISION, TRITON_HEAD_WIDTHS
from amos_fairseq.modules.bert_encoder import BertEncoder
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.process import keep_freed_memory
from amos_fairseq.run.hook import Hook

logger = logging.getLogger(__name__)

# cuBLAS reads it when it starts in a process; PyTorch refuses matrix products under any other value than these.
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
# What torch.compile needs on each type of device.
COMPILERS = {
    "cpu": "a C++ compiler (g++ or clang++; CXX names another one)",
    "cuda": "the Triton that belongs to this PyTorch, and a C compiler (gcc; CC names another one)",
}


class Determinism(Hook):
    """``--deterministic`` (``model.deterministic``): the same seed gives the same bits on a GPU, at the cost of speed.

    Some CUDA kernels add numbers with atomic operations, in an order that changes from run to run.
    ``torch.use_deterministic_algorithms`` replaces them by others, or raises ``RuntimeError`` where there is none. For the
    operations of this package (sources: its documentation, PyTorch's ``attention_backward.cu`` and ``sdp_utils.cpp``):

        attention, flash                backward pass without atomic additions
        attention, memory-efficient     keys are not split between programs, also for the gradient of a bias
        attention, cuDNN                refused, so :func:`~amos_fairseq.functional.attention.choose_backend` leaves it out
        this package's Triton kernels   unchanged: every sum has a fixed order
        scatter_add, index_add, and the gradients of gather and of indexing by tensors
                                        sorted by index first, then added
        cumsum of floating point numbers
                                        refused, so sampling sums integers:
                                        :func:`~amos_fairseq.functional.sampling.running_sums`
        matrix products                 cuBLAS needs a fixed workspace, by an environment variable

    On a CPU nothing changes: every kernel has a fixed order for a given number of threads.
    """

    def before_trainer(self, cfg: Any) -> None:
        if not OmegaConf.select(cfg, "model.deterministic") or visible_gpus(cfg) == 0:
            return
        if os.environ.get(WORKSPACE_VARIABLE) not in WORKSPACES:
            os.environ[WORKSPACE_VARIABLE] = WORKSPACES[0]
        torch.use_deterministic_algorithms(True)
        # By default PyTorch then also fills all new memory, for programs that read it before they write it. This one does not.
        torch.utils.deterministic.fill_uninitialized_memory = False
        if cfg.distributed_training.distributed_rank == 0:
            logger.info("only kernels that add in a fixed order run: the same seed gives the same bits, more slowly")


class Kernels(Hook):
    """``model.kernels`` and ``model.compile``: test what they need now, not with a long traceback in the first update. Only a
    trainer compiles, and nothing that exports, inspects or scores a model."""

    def after_trainer(self, trainer: Trainer) -> None:
        if str(OmegaConf.select(trainer.cfg, "model.kernels")) == "triton" and trainer.device.type == "cuda":
            require_triton(trainer.device, trainer.get_model())
        if not OmegaConf.select(trainer.cfg, "model.compile"):  # models outside this package have no such setting
            return
        if trainer.is_data_parallel_master:
            logger.info("compiling the encoder's layers: the first updates take about a minute longer")
        require_compiler(trainer.device)
        # PyTorch would split every layer at the buckets of DistributedDataParallel, to exchange a bucket while the rest of the
        # graph is computed. Here the graph is one layer, and the layers below it are the rest.
        torch._dynamo.config.optimize_ddp = False
        for module in trainer.get_model().modules():
            if isinstance(module, TransformerEncoder):
                module.is_compiled = True


def require_compiler(device: torch.device) -> None:
    """Compile a small function on ``device``; raise :class:`UserError` where PyTorch cannot."""
    unique = time.time()  # a constant of the graph: otherwise PyTorch may find it in its cache and start no compiler

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * unique).sin()

    tools = COMPILERS.get(device.type, "what PyTorch needs to compile")
    with _explained("model.compile=true", tools, "model.compile=false (without --compile)"):
        torch.compile(scaled)(torch.ones(64, device=device))


def require_triton(device: torch.device, model: torch.nn.Module) -> None:
    """Run the attention of ``model.kernels=triton``, as in training, for every width of a head, forward and backward."""
    # ModernBERT's encoder does not use them, but the output layer beside it needs the same tools: one width stands for it.
    shapes = [module.shape for module in model.modules() if isinstance(module, BertEncoder)]
    widths = {shape.width // shape.num_heads for shape in shapes} & {*TRITON_HEAD_WIDTHS}
    dtype = next(model.parameters()).dtype
    dtype = dtype if dtype in HALF_PRECISION else torch.float16
    bias = torch.zeros(1, 127, device=device, requires_grad=True)
    with _explained("model.kernels=triton", COMPILERS["cuda"], "model.kernels=fast"):
        attention = importlib.import_module(
            "amos_fairseq.functional.cuda.attention"
        )  # refuses a Triton that is too old
        for width in sorted(widths) or TRITON_HEAD_WIDTHS[:1]:
            heads = torch.randn(1, 64, 3, 1, width, device=device).to(dtype)
            attention.triton_attention(heads.requires_grad_(), bias, dropout=0.1).sum().backward()


@contextlib.contextmanager
def _explained(setting: str, tools: str, other: str) -> Iterator[None]:
    """Turn any exception of the body into a :class:`UserError`: compilers and what starts them raise many kinds."""
    try:
        yield
    except Exception as error:
        # "backend='inductor' raised:" is a line by itself, followed by the reason.
        lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        reason = lines[0] if lines else repr(error)
        raise UserError(
            f"{setting} does not work on this machine ({reason}): install {tools}, or train with {other}"
        ) from error


class Memory(Hook):
    """On a CPU, keep the memory that a rank frees; on a GPU, log how much is free once for each line of the log: PyTorch's
    statistics of memory, for which fairseq asks in every update, take the host a long time."""

    def __init__(self) -> None:
        self.gpu: Any = None  # fairseq's description, whose total the trainer needs to log what is free

    def before_rank(self, cfg: Any) -> None:
        if visible_gpus(cfg) == 0:
            keep_freed_memory()

    def after_trainer(self, trainer: Trainer) -> None:
        self.gpu = trainer.cuda_env

    def before_update(self, trainer: Trainer) -> None:
        is_logged = (trainer.get_num_updates() + 1) % trainer.cfg.common.log_interval == 0
        trainer.cuda_env = self.gpu if is_logged else None
