"""Number formats: what each flag needs beyond fairseq, and what a device cannot do is refused.

Seen by running stock fairseq: ``--bf16`` on the command line means "TPU" and dies without XLA (through Hydra it trains);
``--amp`` on a CPU trains in float32 and says nothing; ``--fp16`` on a CPU dies inside CUDA. fairseq merges all float32
masters into one flat tensor under ``--fp16``, which cannot keep the parameter groups of this package's optimizers, and
asks the user for another flag.
"""

import functools
import sys
from argparse import Namespace
from typing import Any

import torch
from fairseq import options
from fairseq.optim import OPTIMIZER_REGISTRY

from amos_fairseq.errors import UserError, report_user_errors


def keeps_parameter_groups(cfg: Any) -> bool:
    """Whether the optimizer is one of this package's."""
    optimizer = OPTIMIZER_REGISTRY.get(getattr(cfg.optimizer, "_name", None))
    return optimizer is not None and optimizer.__module__.startswith("amos_fairseq.")


def choose_precision(cfg: Any, has_gpu: bool) -> None:
    """Complete ``cfg.common`` for the device.

    Raises:
        UserError: a format that the device or the optimizer does not have, or two at once.
    """
    common = cfg.common
    chosen = [name for name in ("fp16", "bf16", "amp") if getattr(common, name)]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} exclude each other: choose one")
    if chosen and chosen[0] != "bf16" and not has_gpu:
        raise UserError(f"--{chosen[0]} needs a GPU: on a CPU use --bf16, or float32 without a flag")
    if "bf16" in chosen and has_gpu and not torch.cuda.is_bf16_supported():
        raise UserError("--bf16 is a format that this GPU does not have: use --fp16, or float32 without a flag")
    if not keeps_parameter_groups(cfg):
        return
    for name in ("memory_efficient_fp16", "memory_efficient_bf16"):
        if getattr(common, name):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} keeps no float32 weights, which --optimizer {cfg.optimizer._name} updates: "
                f"use --{flag.removeprefix('memory-efficient-')}"
            )
    if common.fp16:
        common.fp16_no_flatten_grads = True


def apply() -> None:
    """Let ``--bf16`` mean bfloat16 on the device at hand; a TPU is meant where ``--tpu`` says so."""
    parse_args_and_arch = options.parse_args_and_arch

    @functools.wraps(parse_args_and_arch)
    @report_user_errors()
    def parse_without_tpu(parser: Any, input_args: Any = None, *args: Any, **kwargs: Any) -> Any:
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

    options.parse_args_and_arch = parse_without_tpu
