"""What a training run costs."""

from dataclasses import dataclass

from omegaconf import DictConfig

from amos_fairseq.flops.operations import count_matmuls
from amos_fairseq.flops.recipe import Recipe, build_recipe


@dataclass(frozen=True)
class TrainingFlops:
    """Floating point operations of training; a multiplication and an addition are two.

    Attributes:
        per_update: of all micro-batches and ranks of one update.
        tokens_per_update: tokens of its blocks, ``<s>`` included.
        max_update: planned updates.
    """

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        """Of all planned updates."""
        return self.per_update * self.max_update


def training_flops(cfg: DictConfig, vocabulary_size: int | None = None) -> TrainingFlops:
    """The matrix products of forward and backward pass, as autograd runs them: today's convention.

    The backward pass has twice the products of the forward pass, but none where a gradient is stopped: sampling, a frozen
    generator. Look-ups of embeddings, element-wise operations and the optimizer's step are not counted. Blocks are taken as
    full.

    Args:
        cfg: composed and resolved, as fairseq's trainer gets it.
        vocabulary_size: entries of the dictionary, special symbols and ``<mask>`` included; None reads ``task.data``.

    Raises:
        UserError: the settings describe no pretraining run, or one without an end or with a cost per update that changes.
    """
    recipe = build_recipe(cfg, vocabulary_size)
    return of_all_updates(recipe, matmuls_of_batch(recipe))


def of_all_updates(recipe: Recipe, per_batch: int) -> TrainingFlops:
    """From the operations of one micro-batch to those of the run."""
    return TrainingFlops(per_batch * recipe.batches_per_update, recipe.tokens_per_update, recipe.max_update)


def matmuls_of_batch(recipe: Recipe) -> int:
    """Operations in the matrix products of one micro-batch, forward and backward."""

    def train_step() -> None:
        loss, _, _ = recipe.criterion(recipe.model, recipe.batch)
        loss.backward()

    return count_matmuls(train_step)
