"""The cost of a training run by two conventions."""

from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig

from amos_fairseq.flops.operations import Operations, count, count_matmuls
from amos_fairseq.flops.recipe import Recipe, build_recipe

Convention = Literal["today", "thesis"]


@dataclass(frozen=True)
class TrainingFlops:
    """Floating point operations of training; a multiplication and an addition are two.

    Attributes:
        per_update: all micro-batches and ranks of one update.
        tokens_per_update: tokens of its blocks, ``<s>`` included.
    """

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        """Operations of all planned updates."""
        return self.per_update * self.max_update


def training_flops(
    cfg: DictConfig, vocabulary_size: int | None = None, convention: Convention = "today", reference: bool = False
) -> TrainingFlops:
    """Count one update of the model and criterion of ``cfg``, assuming full blocks.

    - ``today``: the matrix products of forward and backward pass, as autograd runs them. The backward pass has twice those
      of the forward pass, fewer where a gradient is stopped (sampling, AMOS' stop-gradients, a frozen generator), and more
      where it computes something again: the logits of the output layer, unless ``reference`` (a CPU keeps up to 64 MiB of
      them, which is not considered here), and checkpointed layers. Unless ``reference``, positions whose output is not needed
      are left out after the attention of the last layer.
    - ``thesis`` (section 5.2.2): the backward pass costs as much as the forward pass, embeddings are looked up by products
      with one-hot vectors, and element-wise operations count.

    Neither counts the optimizer's step.

    With a vocabulary of 30,522 and ``reference`` the thesis' convention gives these totals and costs of encoding 128 tokens;
    Table 5.3 prints:

        mlm_small      1.415e18  3.65e9   printed 1.4e18  3.7e9  (BERT-Small)
        mlm_base       6.396e19  2.84e10          6.4e19  2.9e10 (BERT-Base)
        electra_small  1.331e18  3.65e9           1.4e18  3.7e9
        electra_base   6.525e19  2.84e10          6.4e19  2.9e10

    Departures: the table's inference includes a dense classifier on every token (2 D^2 each, 0.5 %), here it is the encoder
    alone. The reference computes ELECTRA's logits to sample from separately from those of its loss, 3 % in small and 2 % in
    base; without them ELECTRA-Small is 1.29e18, also by hand with the sizes of Table 5.1: the table gives it the cost of
    BERT-Small.

    Args:
        cfg: composed and resolved, as fairseq's trainer gets it.
        vocabulary_size: number of dictionary entries, special symbols and ``<mask>`` included; None reads the dictionary of
            ``task.data``.
        reference: count the reference implementation instead of ``model.kernels``.

    Raises:
        UserError: the settings describe no pretraining run, or one without an end or with a varying cost per update.
    """
    recipe = build_recipe(cfg, vocabulary_size, reference)
    if convention == "thesis":
        return by_thesis(recipe, forward_of_batch(recipe)["Global"])
    return by_autograd(recipe)


def by_autograd(recipe: Recipe) -> TrainingFlops:
    """Count by today's convention: the products of a whole training step."""

    def train_step() -> None:
        loss, _, _ = recipe.criterion(recipe.model, recipe.batch)
        loss.backward()

    return _of_updates(recipe, count_matmuls(train_step))


def by_thesis(recipe: Recipe, forward: Operations) -> TrainingFlops:
    """Count by the convention of section 5.2.2, from the forward pass of one micro-batch."""
    return _of_updates(recipe, 2 * forward.total)


def forward_of_batch(recipe: Recipe) -> dict[str, Operations]:
    """Count the forward pass of one micro-batch, loss included, by module: see :func:`count`."""
    return count(lambda: recipe.criterion(recipe.model, recipe.batch))


def _of_updates(recipe: Recipe, per_batch: int) -> TrainingFlops:
    return TrainingFlops(per_batch * recipe.batches_per_update, recipe.tokens_per_update, recipe.max_update)
