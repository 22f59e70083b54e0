"""Dependency parsing (thesis, section 4.2.3): the sentences with their trees, fairseq's task and criterion.

``amos parse`` writes, beside the files of :mod:`amos_fairseq.downstream.words.prepare`:

SPLIT.head.{bin,idx}                            head of each word: 0 for the root, else the number of a word from 1 on
valid.conllu                                    the dev file as it was given
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.corpus import open_lines
from amos_fairseq.downstream.labeled_task import LabeledCriterion
from amos_fairseq.downstream.words.dataset import NO_LABEL, Column, TaggedSentences
from amos_fairseq.downstream.words.model import TREES, ParsingModel
from amos_fairseq.downstream.words.task import SequenceTaggingConfig, SequenceTaggingTask, log_loss
from amos_fairseq.downstream.words.trees import HEAD
from amos_fairseq.downstream.words.views import WordOutput, add_cross_views
from amos_fairseq.experiments import PARSING_VIEWS
from amos_fairseq.setting_checks import setting


class ParsedSentences(TaggedSentences):
    """The sentences of a split with their trees. Words whose head is cut are not trained on."""

    def __init__(self, directory: Path, split: str, num_relations: int, max_tokens: int, **options: Any) -> None:
        super().__init__(directory, split, num_relations, max_tokens, **options)
        self.num_relations = num_relations
        self._heads = open_lines(f"{self.source}.{HEAD}", "give OUT/data/parsing-HASH of amos parse")

    def heads(self, index: int) -> list[int]:
        """Return the head of each word of a sentence, also of those that are cut: 0 for the root."""
        return self._heads[int(self._rows[index])].tolist()

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add what the data set of tagging adds, and ``all_words``, a Python int, with those that are cut.

        ``target`` LongTensor [B,W] is head * number of relations + relation, ``NO_LABEL`` in padded slots and for words whose
        head is cut.
        """
        super().add_labels(batch, samples)
        relations, target = batch["target"], torch.full_like(batch["target"], NO_LABEL)
        for row, sample in enumerate(samples):
            num_kept = len(sample["positions"])
            heads = torch.tensor(self.heads(sample["id"])[:num_kept], dtype=torch.long)
            pairs = heads * self.num_relations + relations[row, :num_kept]
            target[row, :num_kept] = pairs.where(heads <= num_kept, NO_LABEL)
        all_words = sum(len(sample["labels"]) for sample in samples)
        batch |= {"target": target, "nwords": int(target.ne(NO_LABEL).sum()), "all_words": all_words}


@dataclass
class DependencyParsingConfig(SequenceTaggingConfig):
    data: str = setting(MISSING, "OUT/data/parsing-HASH of amos parse")


@register_task("dependency_parsing", dataclass=DependencyParsingConfig)
class DependencyParsingTask(SequenceTaggingTask):
    """Every sentence is an example; its labels are relations. Words beyond the model's length are cut, and in validation
    wrong."""

    model_class = ParsingModel
    head_for = "dependency trees"
    data_set = ParsedSentences
    known_views = PARSING_VIEWS

    @staticmethod
    def head_name(column: Column) -> str:
        return TREES

    @property
    def relations(self) -> list[str]:
        return self.columns[TREES].labels

    def add_head(self, model: ParsingModel) -> dict[str, HeadOutputs]:
        model.register_parsing_head(len(self.relations))
        return {TREES: dataclasses.replace(self.columns[TREES].outputs, kind="trees")}


@register_criterion("dependency_parsing")
class DependencyParsingCriterion(LabeledCriterion):
    """L = -1/W sum_t log p((u, r) of word t), nats; p is one softmax over all heads u and relations r (thesis, section 4.2.3).

    W is the number of words in an update. In validation ``uas`` and ``las`` are those of the most likely edge of each word,
    which may be no tree; ``amos parse`` scores trees. With the task's ``--views``,
    :func:`~amos_fairseq.downstream.words.views.add_cross_views` adds another term.
    """

    of_validation = ("uas", "las")

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        names = [label.partition(":")[0] for label in task.relations]
        # The scores compare relations without their subtypes: the first relation of the same name stands for all.
        self.register_buffer("plain_relations", torch.tensor([names.index(name) for name in names]), persistent=False)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of words, and the sums to log."""
        output: WordOutput = model(**sample["net_input"])
        scores = output.logits[TREES].flatten(2)  # [B,W,(1+W)R]
        target = sample["target"]
        loss = cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="sum")
        num_words = sample["nwords"]
        log = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": num_words}
        loss, sums = add_cross_views(loss, output, sample, self.task)
        if not model.training:
            log |= self._counts(scores.argmax(-1), target) | {"_words": sample["all_words"]}
        return loss, num_words, log | sums | {"loss": loss.detach()}

    def _counts(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Count the right heads, and the right heads with the right relation, of pairs [B,W] int64."""
        num_relations = len(self.plain_relations)
        known = target.clamp(min=0)
        right = target.ne(NO_LABEL) & (predicted // num_relations == known // num_relations)
        relations, gold = (self.plain_relations[pairs % num_relations] for pairs in (predicted, known))
        return {"_heads": right.sum(), "_edges": (right & (relations == gold)).sum()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss and, in validation, the scores over all ranks and accumulated batches."""
        totals = log_loss(logging_outputs)
        if "_words" not in totals:
            return
        for key in ("_words", "_heads", "_edges"):
            metrics.log_scalar_sum(key, totals[key])
        for name, key in (("uas", "_heads"), ("las", "_edges")):
            metrics.log_derived(
                name, lambda meters, key=key: round(100 * mean(meters[key].sum, meters["_words"].sum), 2)
            )
