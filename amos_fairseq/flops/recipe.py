"""A composed configuration as task, model, criterion and batch of their real sizes, on the meta device: no memory, no data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import models, utils
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from omegaconf import DictConfig, OmegaConf

from amos_fairseq.data.block_iterator import blocks_per_batch
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.special_tokens import MASK_SYMBOL
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask, check_settings

DEVICE = torch.device("meta")


@dataclass(frozen=True)
class Recipe:
    """What one update of a configuration is.

    Attributes:
        model: in training mode, on the meta device like ``criterion`` and ``batch``.
        batch: one micro-batch of full blocks.
        batch_size: its number of sequences.
        batches_per_update: micro-batches of all ranks in an update.
        max_update: planned updates.
    """

    task: TextPretrainingTask
    model: BaseFairseqModel
    criterion: torch.nn.Module
    batch: dict[str, Any]
    batch_size: int
    batches_per_update: int
    max_update: int

    @property
    def sequences_per_update(self) -> int:
        return self.batch_size * self.batches_per_update

    @property
    def tokens_per_update(self) -> int:
        return self.sequences_per_update * self.task.cfg.tokens_per_sample


def build_recipe(cfg: DictConfig, vocabulary_size: int | None = None) -> Recipe:
    """Build what ``fairseq-hydra-train`` would train.

    Args:
        cfg: composed and resolved, as fairseq's trainer gets it.
        vocabulary_size: entries of the dictionary, special symbols and ``<mask>`` included; None reads ``task.data``.

    Raises:
        UserError: the settings describe no pretraining run, or one without an end or with a cost per update that changes.
    """
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task {cfg.task._name} is no pretraining: FLOPs are counted for text_pretraining")
    if cfg.optimization.max_update < 1:
        raise UserError(
            f"optimization.max_update={cfg.optimization.max_update} sets no end: give the number of planned updates"
        )
    task = build_task(cfg.task, vocabulary_size)
    with DEVICE:
        # Counted are the products of the definitions, not those that a faster way computes twice or leaves out, nor those
        # that are computed again to save memory.
        plain = {"kernels": "reference", "activation_checkpointing": False}
        model = models.build_model(OmegaConf.merge(cfg.model, plain), task).train()
        criterion = task.build_criterion(cfg.criterion).train()
    batch_size = blocks_per_batch(
        task.cfg.tokens_per_sample, cfg.dataset.max_tokens, cfg.dataset.batch_size, model.max_positions()
    )
    return Recipe(
        task=task,
        model=model,
        criterion=criterion,
        batch=full_batch(task, batch_size),
        batch_size=batch_size,
        batches_per_update=update_freq(cfg) * cfg.distributed_training.distributed_world_size,
        max_update=cfg.optimization.max_update,
    )


def build_task(cfg: DictConfig, vocabulary_size: int | None) -> TextPretrainingTask:
    """The task of the corpus ``task.data``, or of a made-up vocabulary."""
    if vocabulary_size is None:
        return TextPretrainingTask.setup_task(cfg)
    check_settings(cfg)
    # No corpus: nobody opens these files.
    vocabulary = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)
    return TextPretrainingTask(cfg, vocabulary, made_up_dictionary(vocabulary_size))


def made_up_dictionary(size: int) -> Dictionary:
    """``size`` entries, special symbols and ``<mask>`` included; the pieces have counts, as those of a corpus.

    Raises:
        UserError: there is no room for a piece.
    """
    dictionary = Dictionary()
    num_pieces = size - len(dictionary) - 1
    if num_pieces < 1:
        raise UserError(f"a vocabulary of {size} has no room for pieces beside {len(dictionary) + 1} special symbols")
    for number in range(num_pieces):
        dictionary.add_symbol(f"piece{number}", n=num_pieces - number)
    dictionary.add_symbol(MASK_SYMBOL)
    return dictionary


def full_batch(task: TextPretrainingTask, batch_size: int) -> dict[str, Any]:
    """One micro-batch as the task's own dataset makes it, every block full, on the meta device."""
    special = set(task.special_ids)
    piece = next(index for index in range(len(task.dictionary)) if index not in special)
    block = torch.full((task.cfg.tokens_per_sample - 1,), piece)
    blocks = task.mask_blocks([block], training=True, source="a made-up block")
    batch = blocks.collater([blocks[0]] * batch_size)
    return utils.apply_to_sample(lambda tensor: tensor.to(DEVICE), batch)


def update_freq(cfg: DictConfig) -> int:
    """Micro-batches that a rank accumulates in an update; :class:`UserError` where that changes with the epoch."""
    numbers = set(cfg.optimization.update_freq)
    if len(numbers) != 1:
        raise UserError(
            f"optimization.update_freq={list(cfg.optimization.update_freq)} changes with the epoch, and with it the cost "
            "of an update: give one number"
        )
    return numbers.pop()
