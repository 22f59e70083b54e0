"""Sequence tagging, one label a word, such as parts of speech, chunks and named entities, and dependency parsing (thesis,
section 4.2.3): fairseq's tasks and criterions."""

import dataclasses
import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.downstream.labeled_task import (
    AVERAGE,
    LabeledCriterion,
    LabeledTask,
    LabeledTaskConfig,
    log_means,
    open_vocabulary,
    prepared_directories,
)
from amos_fairseq.downstream.words.dataset import (
    NO_LABEL,
    Column,
    MixedSentences,
    ParsedSentences,
    TaggedSentences,
    WordSequences,
    columns_by_head,
    has_unlabeled,
)
from amos_fairseq.downstream.words.model import TREES, ParsingModel, WordModel
from amos_fairseq.downstream.words.views import WithUnlabeled, WordOutput, add_cross_views, log_cross_views, parse_views
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import PARSING_VIEWS, SAMPLING_EXPONENT, TAGGING_VIEWS
from amos_fairseq.inputs.schemes import main_score, scores
from amos_fairseq.inputs.word_files import UNLABELED
from amos_fairseq.setting_checks import setting
from amos_fairseq.text import MASK_SYMBOL

logger = logging.getLogger(__name__)
SCORED = "_count_"  # begins a key of the log: _count_NAME, or of several columns _count_NAME/COLUMN


@dataclass
class SequenceTaggingConfig(LabeledTaskConfig):
    data: str = setting(
        MISSING, "directory that amos prepare tagging wrote; several, separated by ':', are tasks with a head each"
    )
    tokens_per_sentence: int = setting(
        512, "tokens of a sentence with <s> and </s>; longer ones are cut at a word boundary", "2 or more"
    )
    sampling_exponent: float = setting(
        SAMPLING_EXPONENT,
        "of several columns: the share of one of |D| sentences is proportional to |D| to this power (0: equal shares)",
        "0 or more and at most 1",
    )
    views: str = setting(
        "",
        "cross-view training on the unlabeled sentences of the data: views separated by ',', of full, forward, "
        "backward, future, past and word_dropout (dependency_parsing: full, forward-forward, forward-backward, "
        "backward-forward, backward-backward and word_dropout)",
    )
    unlabeled_start: float = setting(
        0.1,
        "fraction of --max-update, or else of --total-num-update, before unlabeled sentences train the model "
        "itself; until then they train only the modules of the views",
        "0 or more and below 1",
    )
    max_update: int = II("optimization.max_update")
    total_num_update: float = "${oc.select:lr_scheduler.total_num_update,0}"


@register_task("sequence_tagging", dataclass=SequenceTaggingConfig)
class SequenceTaggingTask(LabeledTask):
    """Every sentence is an example; words beyond the model's length are cut, counted and, in validation, wrong.

    Several ``columns`` of labels, by the name of their head, are mixed as the tasks of ``MixedTasks``. With ``--views`` each
    batch also has unlabeled sentences, of all of ``data``.
    """

    cfg: SequenceTaggingConfig
    length = "tokens_per_sentence"
    model_class = WordModel
    head_for = "labels"
    data_set: type[TaggedSentences] = TaggedSentences
    known_views = TAGGING_VIEWS

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, columns: dict[str, Column]) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        self.columns, self.views = columns, parse_views(cfg.views, self.known_views)
        if self.views and cfg.unlabeled_start > 0 and not self.total_updates():
            raise UserError("--unlabeled-start is a fraction of --max-update or --total-num-update: give one, or 0")

    @classmethod
    def setup_task(cls, cfg: SequenceTaggingConfig, **kwargs: Any) -> "SequenceTaggingTask":
        columns = columns_by_head(prepared_directories(cfg), cls.head_name)
        return cls(cfg, *open_vocabulary([column.directory for column in columns.values()]), columns)

    @staticmethod
    def head_name(column: Column) -> str:
        return column.head

    def add_head(self, model: WordModel) -> dict[str, HeadOutputs]:
        for head, column in self.columns.items():
            model.register_word_head(head, len(column.labels))
        return {head: column.outputs for head, column in self.columns.items()}

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> WordModel:
        model = super().build_model(cfg, from_checkpoint)
        if self.views:
            model.register_cross_views(self.views, self.dictionary.index(MASK_SYMBOL))
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        training = split == self.cfg.train_subset
        datasets = {head: self._sentences(column, split, training) for head, column in self.columns.items()}
        if len(datasets) == 1:
            (dataset,) = datasets.values()
        else:
            order = (self.cfg.seed, training, self.cfg.sampling_exponent)
            dataset = MixedSentences(datasets, split, *order)
        if training and self.views:
            dataset = WithUnlabeled(dataset, self._unlabeled(), self.cfg.seed)
        self.datasets[split] = dataset

    def _sentences(self, column: Column, split: str, training: bool) -> TaggedSentences:
        settings = {"max_tokens": self.cfg.tokens_per_sentence, "seed": self.cfg.seed, "training": training}
        dataset = self.data_set(column.directory, split, len(column.labels), **settings)
        logger.info(f"{dataset.source}: {dataset.describe()}")
        return dataset

    def _unlabeled(self) -> list[WordSequences]:
        datasets = [
            WordSequences(column.directory, UNLABELED, self.cfg.tokens_per_sentence, training=True)
            for column in self.columns.values()
            if has_unlabeled(column.directory)
        ]
        if not datasets:
            raise UserError("--views needs sentences without labels: prepare the data with --unlabeled")
        for dataset in datasets:
            logger.info(f"{dataset.source}: {dataset.describe()}")
        logger.info(f"unlabeled sentences train the model itself from update {self.first_unlabeled_update() + 1:,} on")
        return datasets

    def order_of_epoch(self, dataset: Any, batches_per_update: int, batch_size: int) -> np.ndarray:
        if not isinstance(dataset, WithUnlabeled):
            return super().order_of_epoch(dataset, batches_per_update, batch_size)
        self.check_update_freq()
        labeled, global_batch = dataset.labeled, batches_per_update * batch_size
        order = super().order_of_epoch(labeled, batches_per_update, batch_size)
        before = (labeled.epoch - 1) * len(order)
        if isinstance(labeled, MixedSentences):
            before = labeled.rows_before() // global_batch * global_batch
        return dataset.begin_epoch(order, before, self.cfg.similar_lengths)

    def before_step(self, sample: dict[str, Any], criterion: Any, update_num: int) -> dict[str, Any]:
        """Until ``--unlabeled-start`` only the modules of the views learn from unlabeled sentences."""
        if not self.views:
            return sample
        inputs, alone = sample["net_input"], {"modules_alone": update_num < self.first_unlabeled_update()}
        return sample | {"net_input": inputs | {"unlabeled": inputs["unlabeled"] | alone}}

    def first_unlabeled_update(self) -> int:
        """Return the number of updates before the first unlabeled sentence."""
        return math.ceil(self.cfg.unlabeled_start * self.total_updates())

    def total_updates(self) -> float:
        """Return the number of updates that the settings name; 0 for none, as with ``--max-epoch`` alone."""
        return self.cfg.max_update or self.cfg.total_num_update


@dataclass
class DependencyParsingConfig(SequenceTaggingConfig):
    data: str = setting(MISSING, "OUT/data/parsing-HASH of amos parse")


@register_task("dependency_parsing", dataclass=DependencyParsingConfig)
class DependencyParsingTask(SequenceTaggingTask):
    """Every sentence is an example; its labels are relations. Words beyond the model's length are cut, in validation wrong."""

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
        return {TREES: dataclasses.replace(super().add_head(model)[TREES], kind="trees")}


@dataclass
class SequenceTaggingCriterionConfig(FairseqDataclass):
    label_smoothing: float = setting(
        0.0,
        "in training, this share of a word's label is spread over all labels (thesis, section 4.3.1: 0.1)",
        "0 or more and below 1",
    )


@register_criterion("sequence_tagging", dataclass=SequenceTaggingCriterionConfig)
class SequenceTaggingCriterion(LabeledCriterion):
    """L = -1/W sum_w log p(label of word w | state of its first piece), nats; p is a softmax over all labels.

    W is the number of words in an update, as in Hugging Face's models for token classification. With label smoothing e, the
    target of a word is 1 - e for its label and e / labels for each. With the task's ``--views``,
    ``amos_fairseq.downstream.words.views.add_cross_views`` adds another term. The log has the scores of
    ``amos tag`` (``schemes.py``), where words that are cut are wrong; of several columns each, with its name, and the
    ``average`` of their main scores. Scores are those of validation alone.
    """

    def __init__(self, task: Any, label_smoothing: float) -> None:
        super().__init__(task)
        self.columns, self.label_smoothing = task.columns, label_smoothing

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        output: WordOutput = model(**sample["net_input"])
        smoothing = self.label_smoothing if model.training else 0.0
        # What each head is compared with: of several columns those of its own sentences.
        targets, losses, counts = sample.get("parts", dict.fromkeys(self.columns, sample)), [], Counter()
        for head, column in self.columns.items():
            logits, target = output.logits[head].flatten(0, 1), targets[head]["target"].flatten()  # [BW,labels], [BW]
            losses.append(
                cross_entropy(logits, target, ignore_index=NO_LABEL, reduction="sum", label_smoothing=smoothing)
            )
            if not model.training:  # an update does not wait for the device
                suffix = f"/{column.name}" if len(self.columns) > 1 else ""
                for name, number in count_right(column, output.logits[head], targets[head]).items():
                    counts[f"{SCORED}{name}{suffix}"] = number
        loss, num_words = torch.stack(losses).sum(), sample["nwords"]
        log = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": num_words}
        loss, sums = add_cross_views(loss, output, sample)
        return loss, num_words, log | sums | counts | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss and the scores over all ranks and accumulated batches."""
        totals = log_loss(logging_outputs)
        keys_of_columns: dict[str, dict[str, str]] = {}  # column -> what is counted -> key
        for key in totals:
            if key.startswith(SCORED):
                metrics.log_scalar_sum(key, totals[key])
                name, _, column = key.removeprefix(SCORED).partition("/")
                keys_of_columns.setdefault(column, {})[name] = key

        def score(column: str, name: str, meters: Any) -> float:
            return scores({counted: meters[key].sum for counted, key in keys_of_columns[column].items()})[name]

        def average(meters: Any) -> float:
            mains = [score(column, main_score("spans" in keys), meters) for column, keys in keys_of_columns.items()]
            return round(sum(mains) / len(mains), 2)

        for column, keys in keys_of_columns.items():
            for name in scores({counted: totals[key] for counted, key in keys.items()}):
                shown = f"{name}_{column}" if column else name
                metrics.log_derived(shown, lambda meters, c=column, n=name: round(score(c, n, meters), 2))
        if len(keys_of_columns) > 1:
            metrics.log_derived(AVERAGE, average)


@register_criterion("dependency_parsing")
class DependencyParsingCriterion(LabeledCriterion):
    """L = -1/W sum_t log p((u, r) of word t), nats; p is one softmax over all heads u and relations r (thesis, section 4.2.3).

    W is the number of words in an update. In validation ``uas`` and ``las`` are those of the most likely edge of each word,
    which may be no tree; ``amos parse`` scores trees. With the task's ``--views``,
    ``amos_fairseq.downstream.words.views.add_cross_views`` adds another term.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        names = [label.partition(":")[0] for label in task.relations]
        # The scores compare relations without their subtypes: the first relation of the same name stands for all.
        self.register_buffer("plain_relations", torch.tensor([names.index(name) for name in names]), persistent=False)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        output: WordOutput = model(**sample["net_input"])
        scores = output.logits[TREES].flatten(2)  # [B,W,(1+W)R]
        target = sample["target"]
        loss = cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="sum")
        num_words = sample["nwords"]
        log = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": num_words}
        loss, sums = add_cross_views(loss, output, sample)
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


def log_loss(logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the sums over all ranks and accumulated batches; log the mean loss of words, and those of views."""
    totals = {key: float(total) for key, total in log_means(logging_outputs, "loss").items()}
    log_cross_views(totals)
    return totals


def count_right(column: Column, logits: Tensor, sentences: dict[str, Any]) -> Counter[str]:
    """Return the sums of ``Column.count`` over ``sentences``, of which the logits are [B,W,labels]."""
    kept = sentences["target"].ne(NO_LABEL).sum(1).tolist()
    counts = column.count([], [])  # the same keys without a sentence
    for gold, predicted, num_kept in zip(sentences["labels"], logits.argmax(-1).tolist(), kept, strict=True):
        counts.update(column.count(gold, predicted[:num_kept]))
    return counts
