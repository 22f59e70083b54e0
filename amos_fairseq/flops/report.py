"""Everything that ``amos flops`` says about a configuration."""

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.flops.operations import Operations, count
from amos_fairseq.flops.recipe import DEVICE, Recipe, build_recipe
from amos_fairseq.flops.training import TrainingFlops, by_autograd, by_thesis, forward_of_batch

# What the model does itself: products with the tied token embeddings, sampling.
OWN_WORK = "output layer, sampling"
LOSS = "loss, statistics"


@dataclass(frozen=True)
class Report:
    """Floating point operations of training and of reading a text.

    Attributes:
        objective: name of the criterion.
        num_rows: of the token embeddings: entries of the dictionary, rounded up.
        tokens_per_sequence: length of a training block.
        batch_size: sequences of a micro-batch.
        batches_per_update: micro-batches of all ranks.
        modules: forward pass per token, by part of the model.
        today, thesis: training by either convention.
        inference_length: tokens of the text that the encoder reads.
        inference: forward pass of the kept encoder alone; today's convention counts its ``matmul``, the thesis all. None
            where no encoder is kept (TwoTower).
    """

    objective: str
    num_rows: int
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
        """All modules together, per token."""
        return Operations(*(sum(kind) for kind in zip(*self.modules.values(), strict=True)))

    def as_json(self) -> dict[str, Any]:
        """Plain values, for ``--json``."""
        return {
            "objective": self.objective,
            "embedding_rows": self.num_rows,
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


def report_flops(cfg: DictConfig, vocabulary_size: int | None, inference_length: int | None) -> Report:
    """Count training and inference.

    Args:
        cfg, vocabulary_size: those of :func:`training_flops`.
        inference_length: tokens of the text; None takes the 128 of thesis Table 5.3, or what the model can read.

    Raises:
        UserError: as :func:`training_flops`; or the model reads no text of that length.
    """
    recipe = build_recipe(cfg, vocabulary_size)
    longest = recipe.model.max_positions()
    length = min(128, longest) if inference_length is None else inference_length
    if not 1 <= length <= longest:
        raise UserError(f"--length {length}: the model reads 1 to {longest} tokens (model.max_positions)")
    forward = forward_of_batch(recipe)
    return Report(
        objective=cfg.criterion._name,
        num_rows=recipe.model.embed_tokens.num_embeddings,
        tokens_per_sequence=cfg.task.tokens_per_sample,
        batch_size=recipe.batch_size,
        batches_per_update=recipe.batches_per_update,
        modules=modules_per_token(recipe, forward),
        today=by_autograd(recipe),
        thesis=by_thesis(recipe, forward["Global"]),
        inference_length=length,
        inference=reading(recipe.model, length),
    )


def modules_per_token(recipe: Recipe, forward: dict[str, Operations]) -> dict[str, Operations]:
    """The parts of the model in its own order, then what it does outside of them, then the criterion."""
    root = type(recipe.model).__name__
    modules = {name: of_child(forward, f"{root}.{name}", child) for name, child in recipe.model.named_children()}
    modules[OWN_WORK] = minus(forward[root], modules.values())
    modules[LOSS] = minus(forward["Global"], [forward[root]])
    num_tokens = recipe.batch["net_input"]["tokens"].numel()
    per_token = {name: Operations(*(part / num_tokens for part in of)) for name, of in modules.items()}
    return {name: operations for name, operations in per_token.items() if operations.total}


def of_child(forward: dict[str, Operations], name: str, child: nn.Module) -> Operations:
    """A part of the model; a list of modules is never called itself, its members are."""
    if not isinstance(child, nn.ModuleList):
        return forward.get(name, Operations())
    members = [forward.get(f"{name}.{member}", Operations()) for member, _ in child.named_children()]
    return Operations(*(sum(kind) for kind in zip(Operations(), *members, strict=True)))


def minus(whole: Operations, parts: Any) -> Operations:
    return Operations(*(kind - sum(rest) for kind, *rest in zip(whole, *parts, strict=True)))


def reading(model: nn.Module, length: int) -> Operations | None:
    """The forward pass of the encoder to keep, over one text of ``length`` tokens; None if there is no such encoder."""
    try:
        model.encoder  # noqa: B018  (a property that refuses)
    except UserError:
        return None
    tokens = torch.full((1, length), model.vocabulary.end, device=DEVICE)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        operations = count(lambda: model.extract_features(tokens))["Global"]
    model.train(was_training)
    return operations
