"""Floating point operations of training: counted on meta tensors, by kind, by module and by two conventions.

- today (:meth:`CountedUpdate.by_autograd`): the matrix products of forward and backward pass, as autograd runs them. The
  backward pass has twice those of the forward pass, fewer where a gradient is stopped (sampling, AMOS, a frozen generator), and
  more where it computes something again: the logits of the output layer, unless the reference implementation is counted (a
  CPU keeps up to 64 MiB of them, which is not considered here), and checkpointed layers. Unless the reference is counted,
  positions whose output is not needed are left out after the attention of the last layer.
- thesis (:meth:`CountedUpdate.by_thesis`, Clark 2021, section 5.2.2): the backward pass costs as much as the forward pass,
  embeddings are looked up by products with one-hot vectors, and element-wise operations count.

Neither counts the optimizer's step.

With a vocabulary of 30,522 and the reference implementation the thesis' convention gives these totals and costs of encoding 128
tokens; Table 5.3 prints:

    mlm_small      1.415e18  3.65e9   printed 1.4e18  3.7e9  (BERT-Small)
    mlm_base       6.396e19  2.84e10          6.4e19  2.9e10 (BERT-Base)
    electra_small  1.331e18  3.65e9           1.4e18  3.7e9
    electra_base   6.525e19  2.84e10          6.4e19  2.9e10

Departures: the table's inference includes a dense classifier on every token (2 D^2 each, 0.5 %), here it is the encoder alone.
The reference computes ELECTRA's logits to sample from separately from those of its loss, 3 % in small and 2 % in base; without
them ELECTRA-Small is 1.29e18, also by hand with the sizes of Table 5.1: the table gives it the cost of BERT-Small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fairseq import models, utils
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from amos_fairseq.errors import UserError

aten = torch.ops.aten
DEVICE = torch.device("meta")
# Products that are missing in PyTorch's counter, by the shapes of their arguments.
MATMULS = {
    aten.mv: lambda matrix, vector, **keywords: 2 * math.prod(matrix),
    aten.addmm_: lambda total, left, right, **keywords: 2 * math.prod(left) * right[-1],
}


class Operations(NamedTuple):
    """Floating point operations; a multiplication and an addition are two.

    Attributes:
        matmul: products of matrices and vectors.
        look_up: cost of embedding look-ups as products with one-hot vectors, 2 V E per token.
        elementwise: all other arithmetic: activations, residuals, softmax, LayerNorm, dropout, losses; not the bias of a
            linear layer, which PyTorch adds within the product (1 in 2 D operations).
    """

    matmul: float = 0
    look_up: float = 0
    elementwise: float = 0

    @property
    def total(self) -> float:
        return sum(self)


class TrainingFlops(NamedTuple):
    """Operations of one update, over all micro-batches and ranks, and its tokens, ``<s>`` included."""

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        return self.per_update * self.max_update


@dataclass(frozen=True)
class CountedUpdate:
    """One update of a configuration: its parts on the meta device, and one micro-batch of full blocks."""

    cfg: DictConfig
    task: FairseqTask
    model: BaseFairseqModel
    criterion: torch.nn.Module
    batch: dict[str, Any]

    @property
    def batches(self) -> int:
        """Micro-batches of all ranks; raise :class:`UserError` if the number changes with the epoch."""
        numbers = set(self.cfg.optimization.update_freq)
        if len(numbers) != 1:
            raise UserError(
                f"optimization.update_freq={list(self.cfg.optimization.update_freq)} changes with the epoch, and with it the "
                "cost of an update: give one number"
            )
        return numbers.pop() * self.cfg.distributed_training.distributed_world_size

    def by_autograd(self) -> TrainingFlops:
        """Count by today's convention: the products of a whole training step."""

        def train_step() -> None:
            loss, _, _ = self.criterion(self.model, self.batch)
            loss.backward()

        return self._of_updates(count_matmuls(train_step))

    def by_thesis(self) -> TrainingFlops:
        """Count by the convention of section 5.2.2, from the forward pass."""
        return self._of_updates(2 * self.forward()["Global"].total)

    def forward(self) -> dict[str, Operations]:
        """Count the forward pass of one micro-batch, loss included, by module: see :func:`count_operations`."""
        return count_operations(lambda: self.criterion(self.model, self.batch))

    def _of_updates(self, per_batch: int) -> TrainingFlops:
        tokens = self.batch["nsentences"] * self.batches * self.task.cfg.tokens_per_sample
        return TrainingFlops(per_batch * self.batches, tokens, self.cfg.optimization.max_update)


def build_update(cfg: DictConfig, task: FairseqTask, reference: bool = False) -> CountedUpdate:
    """Build on the meta device what a run trains, where no kernel of a particular device runs.

    ``model.kernels=triton`` is counted as ``fast``, whose products it repeats or skips in the same places.

    Args:
        cfg: resolved, as fairseq's trainer gets it.
        task: of pretraining, with its vocabulary.
        reference: build the reference implementation instead, without recomputed layers.
    """
    if minutes := OmegaConf.select(cfg, "lr_scheduler.minutes"):
        known = cfg.optimization.max_update > 0  # not in a checkpoint of such a run
        counted = "counts its optimization.max_update" if known else "and optimization.max_update=N count N updates"
        raise UserError(f"trains for {minutes / 60:.2g} hours; lr_scheduler.minutes=0 {counted}")
    if cfg.optimization.max_update < 1:
        raise UserError(
            f"optimization.max_update={cfg.optimization.max_update} sets no end: give the number of planned updates"
        )
    if OmegaConf.select(cfg, "task.phases"):
        raise UserError(
            "task.phases change the cost of an update: give task.phases=null and the length of one as task.tokens_per_sample"
        )
    with DEVICE:
        settings = {"kernels": "reference" if cfg.model.kernels == "reference" else "fast", "compile": False}
        if reference:
            settings |= {"kernels": "reference", "activation_checkpointing": False}
        model = models.build_model(OmegaConf.merge(cfg.model, settings), task).train()
        criterion = task.build_criterion(cfg.criterion).train()
    batch = task.full_batch(cfg.dataset.max_tokens, cfg.dataset.batch_size, model.max_positions())
    return CountedUpdate(cfg, task, model, criterion, utils.apply_to_sample(lambda tensor: tensor.to(DEVICE), batch))


def count_matmuls(call: Callable[[], Any]) -> int:
    """Count the operations in products of matrices and vectors, including those of a backward pass."""
    with FlopCounterMode(display=False, custom_mapping=MATMULS) as counter:
        call()
    return counter.get_total_flops()


# Operations per element of the result, for operators that combine several; an exp or a random number is one operation like
# an addition (thesis section 5.2.2).
ELEMENTWISE = {
    aten.gelu: 5,  # x / sqrt 2, erf, + 1, * x, / 2
    aten._softmax: 5,  # maximum, subtract, exp, sum, divide
    aten._safe_softmax: 5,
    aten._log_softmax: 5,  # maximum, subtract, exp, sum, subtract
    aten.native_layer_norm: 7,  # sum, subtract, square, sum, divide, scale, shift
    aten.binary_cross_entropy_with_logits: 6,  # (1 - target) x + log(1 + exp(-x))
    aten.log_sigmoid_forward: 4,  # minimum with 0, - log(1 + exp(-|x|))
    aten.bernoulli_: 2,  # a random number, a comparison; dropout's division and product are separate operators
    aten.exponential_: 3,  # a random number, its logarithm, a scale
}
ONE_PER_INPUT = (aten.cumsum, aten.scatter_add, aten.index_add, aten.topk)  # per input element, like the reductions
LOGSUMEXP = 4  # per input element: maximum, subtract, exp, sum
NO_ARITHMETIC = (aten.clone, aten._to_copy, aten.copy_)  # PyTorch tags them as pointwise


def count_operations(call: Callable[[], Any]) -> dict[str, Operations]:
    """Count the operations of ``call``, which runs twice: to find its operators, and to count them.

    Returns:
        The operations of every module that ran, including those inside it, under the name that PyTorch's counter uses
        (``AmosModel.discriminator``); and all operations as ``Global``.
    """
    with _UsedOperators() as used:
        call()
    with FlopCounterMode(display=False, custom_mapping=used.formulas()) as counter:
        call()
    return {"Global": Operations()} | {name: _by_kind(of) for name, of in counter.get_flop_counts().items()}


class _UsedOperators(TorchDispatchMode):
    """Record the operators that run, with PyTorch's tags: tables of all operators are not part of its public API."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[Any, set[torch.Tag]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tags.setdefault(func.overloadpacket, set()).update(func.tags)
        return func(*args, **(kwargs or {}))

    def formulas(self) -> dict[Any, Callable]:
        """Map an operator to a function from the shapes of its arguments and result to its operations."""
        formulas = {operator: _elementwise_formula(operator, tags) for operator, tags in self.tags.items()}
        # PyTorch's counter has formulas for most products.
        formulas = {operator: formula for operator, formula in formulas.items() if operator not in flop_registry}
        return {key: formula for key, formula in formulas.items() if formula} | MATMULS | {aten.embedding: _look_up}


def _elementwise_formula(operator: Any, tags: set[torch.Tag]) -> Callable | None:
    """Return None for an operator that only creates, moves or selects values."""
    if operator in NO_ARITHMETIC:
        return None
    if operator in ELEMENTWISE:
        return _per_result(ELEMENTWISE[operator])
    if operator is aten.logsumexp:
        return _per_input(LOGSUMEXP)
    if torch.Tag.reduction in tags or operator in ONE_PER_INPUT:
        return _per_input(1)
    return _per_result(1) if torch.Tag.pointwise in tags else None


def _per_result(operations: int) -> Callable:
    def formula(*arguments: Any, out_shape: Any, **keywords: Any) -> int:
        return operations * math.prod(out_shape if isinstance(out_shape, torch.Size) else out_shape[0])

    return formula


def _per_input(operations: int) -> Callable:
    def formula(input_shape: torch.Size, *arguments: Any, **keywords: Any) -> int:
        return operations * math.prod(input_shape)

    return formula


def _look_up(table_shape: torch.Size, ids_shape: torch.Size, *arguments: Any, **keywords: Any) -> int:
    return 2 * math.prod(table_shape) * math.prod(ids_shape)


def _by_kind(of_operators: dict[Any, int]) -> Operations:
    kinds = {"matmul": 0, "look_up": 0, "elementwise": 0}
    for operator, operations in of_operators.items():
        is_matmul = operator in flop_registry or operator in MATMULS
        kinds["matmul" if is_matmul else "look_up" if operator is aten.embedding else "elementwise"] += operations
    return Operations(**kinds)
