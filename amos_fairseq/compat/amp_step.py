"""``--amp`` divides the gradient by the loss scale once.

fairseq unscales the gradients of the torch optimizer before it clips them, but then steps with its own wrapper around that
optimizer. torch's GradScaler tells optimizers apart by identity, takes the wrapper for one that was not unscaled yet, and
divides by the scale again. The update then uses g / scale, after a clipping that saw g: Adam forgives it only while
g / scale is far above its epsilon, which at the usual scale of 2^16 it is not.
"""

import functools

from fairseq.optim import AMPOptimizer


def apply() -> None:
    """Step with the optimizer whose gradients were unscaled; its wrapper would only pass the call on."""
    stock_step = AMPOptimizer.step

    @functools.wraps(stock_step)
    def step(self: AMPOptimizer) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    AMPOptimizer.step = step
