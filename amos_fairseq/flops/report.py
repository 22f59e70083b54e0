"""The results of ``amos flops`` for a configuration, as plain values and as tables in the terminal."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.flops.configuration import build_counted_update
from amos_fairseq.flops.counting import (
    DEVICE,
    CountedUpdate,
    Operations,
    TrainingFlops,
    by_autograd,
    by_thesis,
    count_operations,
    forward_of_batch,
)

# Operations of the model itself: products with the tied token embeddings, sampling.
OWN_WORK = "output layer, sampling"
LOSS = "loss, statistics"


@dataclass(frozen=True)
class FlopsReport:
    """Floating point operations of training and inference.

    Attributes:
        objective: name of the criterion.
        vocabulary_rows: padded vocabulary size (rows of the token embeddings).
        batch_size: sequences of a micro-batch.
        batches_per_update: micro-batches of all ranks.
        modules: forward pass per token, by part of the model.
        today, thesis: training by either convention.
        inference_length: number of tokens that the encoder processes.
        inference: forward pass of the final encoder alone; today's convention counts its ``matmul``, the thesis all. None if
            no encoder remains after training (TwoTower).
    """

    objective: str
    vocabulary_rows: int
    tokens_per_sequence: int
    batch_size: int
    batches_per_update: int
    modules: dict[str, Operations]
    today: TrainingFlops
    thesis: TrainingFlops
    inference_length: int
    inference: Operations | None

    @property
    def forward(self) -> Operations:
        """The sum of all modules, per token."""
        return total(self.modules.values())

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "objective": self.objective,
            "embedding_rows": self.vocabulary_rows,
            "tokens_per_sequence": self.tokens_per_sequence,
            "sequences_per_update": self.batch_size * self.batches_per_update,
            "max_update": self.today.max_update,
            "forward_per_token": {name: operations._asdict() for name, operations in self.modules.items()},
            "training": {
                name: {"per_token": cost.per_token, "per_update": cost.per_update, "total": cost.total}
                for name, cost in (("today", self.today), ("thesis", self.thesis))
            },
            "inference": self.inference
            and {"tokens": self.inference_length, "today": self.inference.matmul, "thesis": self.inference.total},
        }


def report_flops(
    cfg: DictConfig, vocabulary_size: int | None, inference_length: int | None, reference: bool = False
) -> FlopsReport:
    """Count training and inference.

    Args:
        cfg, vocabulary_size, reference: see :func:`~amos_fairseq.flops.configuration.training_flops`.
        inference_length: number of tokens; None takes the 128 of thesis Table 5.3, or the maximum length of the model.
    """
    update = build_counted_update(cfg, vocabulary_size, reference)
    longest = update.model.max_positions()
    length = min(128, longest) if inference_length is None else inference_length
    if not 1 <= length <= longest:
        raise UserError(f"--length {length}: the model takes 1 to {longest} tokens (model.max_positions)")
    forward = forward_of_batch(update)
    return FlopsReport(
        objective=cfg.criterion._name,
        vocabulary_rows=update.model.embed_tokens.num_embeddings,
        tokens_per_sequence=cfg.task.tokens_per_sample,
        batch_size=update.batch_size,
        batches_per_update=update.batches_per_update,
        modules=modules_per_token(update, forward),
        today=by_autograd(update),
        thesis=by_thesis(update, forward["Global"]),
        inference_length=length,
        inference=inference_operations(update.model, length),
    )


def modules_per_token(update: CountedUpdate, forward: dict[str, Operations]) -> dict[str, Operations]:
    """Return the parts of the model in its own order, then its work outside of them, then the criterion."""
    root = type(update.model).__name__
    modules = {name: of_child(forward, f"{root}.{name}", child) for name, child in update.model.named_children()}
    modules[OWN_WORK] = minus(forward[root], total(modules.values()))
    modules[LOSS] = minus(forward["Global"], forward[root])
    num_tokens = update.batch["net_input"]["tokens"].numel()
    per_token = {name: Operations(*(kind / num_tokens for kind in of)) for name, of in modules.items()}
    return {name: operations for name, operations in per_token.items() if operations.total}


def of_child(forward: dict[str, Operations], name: str, child: nn.Module) -> Operations:
    """Return the operations of a part of the model; those of a list of modules are the sum of its members."""
    if not isinstance(child, nn.ModuleList):
        return forward.get(name, Operations())
    return total(forward.get(f"{name}.{member}", Operations()) for member, _ in child.named_children())


def total(parts: Iterable[Operations]) -> Operations:
    return Operations(*(sum(kind) for kind in zip(Operations(), *parts, strict=True)))


def minus(whole: Operations, part: Operations) -> Operations:
    return Operations(*(one - other for one, other in zip(whole, part, strict=True)))


def inference_operations(model: nn.Module, length: int) -> Operations | None:
    """Count the forward pass of the final encoder over one sequence of ``length`` tokens; None if there is no encoder."""
    try:
        model.encoder  # noqa: B018  (a property that may raise)
    except UserError:
        return None
    tokens = torch.full((1, length), model.vocabulary.end, device=DEVICE)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        operations = count_operations(lambda: model.extract_features(tokens))["Global"]
    model.train(was_training)
    return operations


def print_report(name: str, report: FlopsReport) -> None:
    """Print the training setup, the forward pass by module, training by both conventions, and inference."""
    console = Console(highlight=False)
    update = f"{report.batch_size} sequences x {report.batches_per_update} batches"
    console.print(
        f"{name} ({report.objective}): {report.today.max_update:,} updates of {update} of {report.tokens_per_sequence} "
        f"tokens; {report.vocabulary_rows:,} rows of token embeddings",
        soft_wrap=True,
    )
    console.print(_module_table(report))
    console.print(_training_table(report))
    console.print(_inference_line(report), soft_wrap=True)


def _inference_line(report: FlopsReport) -> str:
    if report.inference is None:
        return "No encoder remains after training: the towers score text (amos score)."
    operations = report.inference
    return (
        f"Inference on one text of {report.inference_length} tokens: {operations.matmul:.3g} (today), "
        f"{operations.total:.3g} (thesis)"
    )


def _module_table(report: FlopsReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Forward pass per token of the training text", title_justify="left")
    table.add_column("module", no_wrap=True)
    for column in ("products", "look-ups", "element-wise", "share of products"):
        table.add_column(column, justify="right")
    for name, operations in report.modules.items():
        table.add_row(name, *_cells(operations, report.forward))
    table.add_section()
    table.add_row("together", *_cells(report.forward, report.forward))
    return table


def _cells(operations: Operations, whole: Operations) -> list[str]:
    numbers = [f"{number:.3g}" if number else "" for number in operations]
    return [*numbers, f"{operations.matmul / whole.matmul:.1%}" if operations.matmul else ""]


def _training_table(report: FlopsReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Training", title_justify="left")
    table.add_column("convention", no_wrap=True)
    for column in ("per token", "per update", "all updates"):
        table.add_column(column, justify="right")
    rows = {"today: products, forward and backward": report.today, "thesis 5.2.2: all, 2 x forward": report.thesis}
    for name, cost in rows.items():
        table.add_row(name, *(f"{number:.3g}" for number in (cost.per_token, cost.per_update, cost.total)))
    return table
