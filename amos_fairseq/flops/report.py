"""The results of ``amos flops`` for a configuration, as plain values and as tables in the terminal."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.flops.configuration import build_counted_update
from amos_fairseq.flops.counting import DEVICE, CountedUpdate, Operations, TrainingFlops, count_operations


class FlopsReport(NamedTuple):
    """Floating point operations of training and inference.

    Attributes:
        modules: forward pass per token, by part of the model.
        today, thesis: training by either convention.
        inference_length: number of tokens that the encoder processes.
        inference: forward pass of the final encoder alone; today's convention counts its ``matmul``, the thesis all. None if
            no encoder remains after training (TwoTower).
    """

    update: CountedUpdate
    modules: dict[str, Operations]
    today: TrainingFlops
    thesis: TrainingFlops
    inference_length: int
    inference: Operations | None

    @property
    def forward(self) -> Operations:
        return total(self.modules.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "objective": self.update.cfg.criterion._name,
            "embedding_rows": self.update.model.embed_tokens.num_embeddings,
            "tokens_per_sequence": self.update.cfg.task.tokens_per_sample,
            "sequences_per_update": self.update.batch["nsentences"] * self.update.batches,
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
    modules, inference = modules_per_token(update), inference_operations(update.model, length)
    return FlopsReport(update, modules, update.by_autograd(), update.by_thesis(), length, inference)


def modules_per_token(update: CountedUpdate) -> dict[str, Operations]:
    """Return the parts of the model in its own order, then its work outside of them, then the criterion."""
    forward, root = update.forward(), type(update.model).__name__
    modules = {}
    for name, child in update.model.named_children():
        path = f"{root}.{name}"
        # A list of modules has no forward pass of its own.
        names = [f"{path}.{each}" for each, _ in child.named_children()] if isinstance(child, nn.ModuleList) else [path]
        modules[name] = total(forward.get(each, Operations()) for each in names)
    if update.cfg.model.get("generator_checkpoint"):  # a frozen generator is no submodule
        known = {"Global", root, type(update.criterion).__name__}
        modules["frozen_generator"] = total(of for name, of in forward.items() if "." not in name and name not in known)
    # Products with the tied token embeddings, sampling.
    modules["output layer, sampling"] = minus(forward[root], total(modules.values()))
    modules["loss, statistics"] = minus(forward["Global"], forward[root])
    num_tokens = update.batch["net_input"]["tokens"].numel()
    per_token = {name: Operations(*(number / num_tokens for number in of)) for name, of in modules.items()}
    return {name: operations for name, operations in per_token.items() if operations.total}


def total(summands: Iterable[Operations]) -> Operations:
    return Operations(*(sum(numbers) for numbers in zip(Operations(), *summands, strict=True)))


def minus(whole: Operations, part: Operations) -> Operations:
    return Operations(*(one - other for one, other in zip(whole, part, strict=True)))


def inference_operations(model: nn.Module, length: int) -> Operations | None:
    """Count the forward pass of the final encoder over one sequence of ``length`` tokens; None if there is no encoder."""
    try:
        model.encoder  # noqa: B018  (a property that may raise)
    except UserError:
        return None
    tokens = torch.full((1, length), model.vocabulary.end, device=DEVICE)
    model.eval()
    with torch.no_grad():
        operations = count_operations(lambda: model.extract_features(tokens))["Global"]
    model.train()
    return operations


def print_report(name: str, report: FlopsReport) -> None:
    """Print the training setup, the forward pass by module, training by both conventions, and inference."""
    console, values = Console(highlight=False), report.as_json()
    sequences = f"{report.update.batch['nsentences']} sequences x {report.update.batches} batches"
    console.print(
        f"{name} ({values['objective']}): {values['max_update']:,} updates of {sequences} of "
        f"{values['tokens_per_sequence']} tokens; {values['embedding_rows']:,} rows of token embeddings",
        soft_wrap=True,
    )
    modules = _table(
        "Forward pass per token of the training text",
        ("module", "products", "look-ups", "element-wise", "share of products"),
    )
    for module, operations in report.modules.items():
        modules.add_row(module, *_cells(operations, report.forward))
    modules.add_section()
    modules.add_row("together", *_cells(report.forward, report.forward))
    console.print(modules)
    training = _table("Training", ("convention", "per token", "per update", "all updates"))
    rows = {"today: products, forward and backward": report.today, "thesis 5.2.2: all, 2 x forward": report.thesis}
    for convention, cost in rows.items():
        training.add_row(convention, *(f"{number:.3g}" for number in (cost.per_token, cost.per_update, cost.total)))
    console.print(training)
    inference = "No encoder remains after training: the towers score text (amos score)."
    if report.inference is not None:
        costs = f"{report.inference.matmul:.3g} (today), {report.inference.total:.3g} (thesis)"
        inference = f"Inference on one text of {report.inference_length} tokens: {costs}"
    console.print(inference, soft_wrap=True)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _cells(operations: Operations, whole: Operations) -> list[str]:
    numbers = [f"{number:.3g}" if number else "" for number in operations]
    return [*numbers, f"{operations.matmul / whole.matmul:.1%}" if operations.matmul else ""]
