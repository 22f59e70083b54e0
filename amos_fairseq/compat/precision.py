"""Precision flags: complete what fairseq does for each, and refuse what a device does not support.

Stock fairseq, as observed: ``--bf16`` on the command line means "TPU" and fails without XLA (through Hydra it trains);
``--amp`` on a CPU silently trains in float32; ``--fp16`` on a CPU fails inside CUDA. Under ``--fp16`` fairseq merges all
float32 master weights into one flat tensor, which cannot keep the parameter groups of this package's optimizers, and asks
the user for another flag.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from fairseq.optim import OPTIMIZER_REGISTRY, AMPOptimizer

from amos_fairseq.errors import UserError, report_user_errors


def choose_precision(cfg: Any, has_gpu: bool) -> None:
    """Complete ``cfg.common`` for the device.

    Raises:
        UserError: two precisions are set, or the device or the optimizer does not support the one that is set.
    """
    common = cfg.common
    chosen = [name for name in ("fp16", "bf16", "amp") if getattr(common, name)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: choose one")
    if chosen and chosen[0] != "bf16" and not has_gpu:
        raise UserError(f"--{chosen[0]} needs a GPU: on a CPU use --bf16, or float32 without a flag")
    if "bf16" in chosen and has_gpu and not torch.cuda.is_bf16_supported():
        raise UserError("--bf16 is not supported by this GPU: use --fp16, or float32 without a flag")
    optimizer = OPTIMIZER_REGISTRY.get(getattr(cfg.optimizer, "_name", None))
    if optimizer is None or not optimizer.__module__.startswith("amos_fairseq."):
        return  # only this package's optimizers need parameter groups and float32 weights
    for name in ("memory_efficient_fp16", "memory_efficient_bf16"):
        if getattr(common, name):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} keeps no float32 weights, which --optimizer {cfg.optimizer._name} updates: "
                f"use --{flag.removeprefix('memory-efficient-')}"
            )
    if common.fp16:
        common.fp16_no_flatten_grads = True


def parse_bf16_without_tpu(
    parse_args_and_arch: Callable[..., Any], parser: Any, input_args: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Let ``--bf16`` mean bfloat16 on the present device; only ``--tpu`` selects a TPU."""
    with report_user_errors():
        try:
            result = parse_args_and_arch(parser, input_args, *args, **kwargs)
        except ValueError as error:
            if "--fp16 and --tpu" not in str(error):
                raise
            raise UserError("--fp16 and --bf16 exclude each other: choose one") from error
    namespace = result if isinstance(result, Namespace) else result[0]
    if getattr(namespace, "bf16", False):
        namespace.tpu = "--tpu" in (sys.argv if input_args is None else input_args)
    return result


def unscale_once(stock_step: Callable[..., Any], optimizer: AMPOptimizer) -> None:
    """Divide the gradient of ``--amp`` by the loss scale once.

    fairseq unscales the gradients of the torch optimizer before it clips them, but then calls ``GradScaler.step`` with its
    own wrapper around that optimizer. GradScaler identifies optimizers by identity, treats the wrapper as one that has not
    been unscaled, and divides by the scale again. The update then uses g / scale after clipping by the norm of g: Adam
    tolerates that only while g / scale is far above its epsilon, which is not the case at the usual scale of 2^16.
    """
    optimizer.scaler.step(optimizer.optimizer)
    optimizer.scaler.update()
