"""``--bf16`` on any device, and gradients of ``--amp`` that are divided by the loss scale once.

Stock fairseq lets ``--bf16`` on the command line mean "TPU" and fails without XLA; through Hydra it trains.
"""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairseq.optim import AMPOptimizer

from amos_fairseq.errors import UserError


@contextlib.contextmanager
def one_precision() -> Iterator[None]:
    """Name the two flags where fairseq says that --fp16 and --tpu exclude each other."""
    try:
        yield
    except ValueError as error:
        if "--fp16 and --tpu" not in str(error):
            raise
        raise UserError("--fp16 and --bf16 exclude each other: choose one") from error


def leave_tpu_to_its_flag(flags: Namespace, given: Sequence[str]) -> None:
    """Let ``--bf16`` mean bfloat16 on the present device; only ``--tpu`` selects a TPU."""
    if getattr(flags, "bf16", False):
        flags.tpu = "--tpu" in given


def unscale_once(stock_step: Callable[..., Any], optimizer: AMPOptimizer) -> None:
    """Divide the gradient of ``--amp`` by the loss scale once.

    fairseq unscales the gradients of the torch optimizer before it clips them, but calls ``GradScaler.step`` with its own
    wrapper around that optimizer, which GradScaler takes for another one and divides by the scale again. Adam tolerates that
    only while g / scale is far above its epsilon, which is not the case at the usual scale of 2^16.
    """
    optimizer.scaler.step(optimizer.optimizer)
    optimizer.scaler.update()
