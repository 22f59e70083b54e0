"""``--compile`` (``model.compile``) and ``--kernels triton``: test their requirements before training starts.

With ``--compile`` fairseq's trainer runs the encoder's layers through torch.compile. This is set up where a trainer is
created, so that pretraining, fine-tuning and ``amos bench`` share it, and a model that is exported, inspected or scored is
never compiled. torch.compile by itself starts silently at the first update, and reports a missing compiler there with a long
traceback: here it is tested beforehand, and the time it took is logged.
"""

import importlib
import logging
import time
from typing import Any

import torch
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.functional.attention import HALF_PRECISION, TRITON_HEAD_WIDTHS
from amos_fairseq.modules.bert_encoder import BertEncoder
from amos_fairseq.modules.encoder import TransformerEncoder

logger = logging.getLogger(__name__)

# What torch.compile needs on each type of device.
COMPILERS = {
    "cpu": "a C++ compiler (g++ or clang++; CXX names another one)",
    "cuda": "the Triton that belongs to this PyTorch, and a C compiler (gcc; CC names another one)",
}


class CompilationClock:
    """Seconds that torch.compile has taken in this process since the clock was created."""

    def __init__(self) -> None:
        # Imported here, because it takes half a second that only --compile needs.
        from torch._dynamo.callback import on_compile_end, on_compile_start

        self.seconds = 0.0
        self.seconds_before_update = 0.0
        self._start = 0.0
        on_compile_start(self._begin)
        on_compile_end(self._end)

    def _begin(self, *details: Any) -> None:
        self._start = time.perf_counter()

    def _end(self, *details: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def compile_layers(trainer: Trainer) -> None:
    """Compile the layers of the encoders in the trainer's model, and log how long that takes.

    Raises:
        UserError: nothing can be compiled here.
    """
    if trainer.is_data_parallel_master:
        logger.info("compiling the encoder's layers: the first updates take about a minute longer")
    require_compiler(trainer.device)
    # PyTorch would split every layer at the buckets of DistributedDataParallel, to exchange a bucket while the rest of the
    # graph is computed. Here the graph is one layer, and the layers below it are the rest.
    torch._dynamo.config.optimize_ddp = False
    for module in trainer.get_model().modules():
        if isinstance(module, TransformerEncoder):
            module.is_compiled = True
    trainer.compilation_clock = CompilationClock()


def start_clock(trainer: Trainer) -> None:
    """Note the compilation time before an update."""
    if clock := getattr(trainer, "compilation_clock", None):
        clock.seconds_before_update = clock.seconds


def log_compilation(trainer: Trainer, logged: Any) -> None:
    """Log the compilation time of an update that has compiled something."""
    if clock := getattr(trainer, "compilation_clock", None):
        seconds = clock.seconds - clock.seconds_before_update
        if seconds > 0 and trainer.is_data_parallel_master:
            logger.info(f"compiled for {seconds:.0f} seconds in update {trainer.get_num_updates()}")


def prepare_kernels(trainer: Trainer) -> None:
    """Apply ``model.kernels`` and ``model.compile`` after the trainer has been created."""
    if str(OmegaConf.select(trainer.cfg, "model.kernels")) == "triton" and trainer.device.type == "cuda":
        require_triton(trainer.device, trainer.get_model())
    if OmegaConf.select(trainer.cfg, "model.compile"):  # models outside this package have no such setting
        compile_layers(trainer)


def require_compiler(device: torch.device) -> None:
    """Compile a small function on ``device``.

    Raises:
        UserError: PyTorch finds no working compiler, or does not support compilation on this Python.
    """
    new = time.time()  # otherwise the result may come from a cache file of a time when there was a compiler

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * new).sin()

    try:
        torch.compile(scaled)(torch.ones(64, device=device))
    except Exception as error:  # the compiler, and whatever starts it, may raise any exception
        # "backend='inductor' raised:" is a line by itself, followed by the reason.
        reasons = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        raise UserError(
            f"model.compile=true does not work on this machine ({reasons[0] if reasons else repr(error)}): install "
            f"{COMPILERS.get(device.type, 'what PyTorch needs to compile')}, or train with model.compile=false (without "
            "--compile)"
        ) from error


def require_triton(device: torch.device, model: torch.nn.Module) -> None:
    """Run the attention of ``model.kernels=triton`` once for every width of a head in ``model``, forward and backward.

    The kernels are those of training: with a bias and with dropout, in the dtype of the model's weights.

    Raises:
        UserError: Triton is not installed or too old, or does not compile here.
    """
    try:
        attention = importlib.import_module("amos_fairseq.functional.cuda.attention")
    except ValueError as error:
        raise UserError(str(error)) from error
    encoders = [
        module for module in model.modules() if isinstance(module, BertEncoder)
    ]  # ModernBERT's does not use them
    widths = {encoder.shape.width // encoder.shape.num_heads for encoder in encoders} & {*TRITON_HEAD_WIDTHS}
    dtype = next(model.parameters()).dtype
    bias = torch.zeros(1, 127, device=device, requires_grad=True)
    try:
        for width in sorted(widths):
            heads = torch.randn(1, 64, 3, 1, width, device=device).to(
                dtype if dtype in HALF_PRECISION else torch.float16
            )
            attention.triton_attention(heads.requires_grad_(), bias, dropout=0.1).sum().backward()
    except Exception as error:  # the compiler, and whatever starts it, may raise any exception
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise UserError(
            f"model.kernels=triton does not work on this machine ({reason}): install {COMPILERS['cuda']}, or train with "
            "model.kernels=fast"
        ) from error
