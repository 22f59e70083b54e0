"""Texts, or pairs of texts, with a class, several labels, or a number: fairseq's task and criterion."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.data import Dictionary
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.downstream.labeled_task import (
    LabeledCriterion,
    LabeledTask,
    LabeledTaskConfig,
    log_means,
    open_vocabulary,
    prepared_directories,
)
from amos_fairseq.downstream.model import TEXT_HEAD, TextModel
from amos_fairseq.downstream.texts.dataset import (
    UNKNOWN_CLASS,
    LabeledTexts,
    head_outputs,
    read_targets,
    read_task_record,
)
from amos_fairseq.downstream.texts.scores import SCORES, label_counts, label_scores, predictions_of, text_scores
from amos_fairseq.errors import UserError
from amos_fairseq.files import TOKENIZER_DIRECTORY
from amos_fairseq.setting_checks import setting
from amos_fairseq.untrusted import finite_number

logger = logging.getLogger(__name__)
ANNEALED = "annealed"


@dataclass
class TextClassificationConfig(LabeledTaskConfig):
    data: str = setting(MISSING, "directory with task.json, of amos classify or amos prepare glue")
    tokens_per_text: int = setting(
        512, "tokens of a row with special tokens; longer ones are cut, of a pair the longer text first", "1 or more"
    )
    separator_token: Optional[int] = setting(  # noqa: UP045
        None, "2 for a second </s> between the texts of a pair (default: one </s>)"
    )
    teacher: Optional[str] = setting(  # noqa: UP045
        None, "predictions of a teacher to learn from, too: .npy, float32, [rows, outputs] in one dimension"
    )
    gold_weight: str = setting(
        ANNEALED,
        "weight of the labels beside those of the teacher: a number from 0 to 1, or annealed: it rises from 0 to 1 "
        "until --max-update (thesis 3.2.2)",
    )
    max_update: int = II("optimization.max_update")


@register_task("text_classification", dataclass=TextClassificationConfig)
class TextClassificationTask(LabeledTask):
    """Every row is an example; rows beyond the model's length are cut and counted."""

    cfg: TextClassificationConfig
    length = "tokens_per_text"
    model_class: type[TextModel] = TextModel
    head_for = "texts"

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, record: dict[str, Any]) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        self.record = record
        self.fixed_gold_weight = parse_gold_weight(cfg)

    @classmethod
    def setup_task(cls, cfg: TextClassificationConfig, **kwargs: Any) -> "TextClassificationTask":
        (directory,) = prepared_directories(cfg, several=False)
        record = read_task_record(directory)
        return cls(cfg, *vocabulary_of([directory], cfg.separator_token), record)

    def add_head(self, model: TextModel) -> dict[str, HeadOutputs]:
        record = self.record
        scale = (record["mean"], record["deviation"]) if "deviation" in record else None
        model.register_classification_head(TEXT_HEAD, record["num_classes"], scale)
        model.head_of_task = {record["task"]: TEXT_HEAD}
        return {TEXT_HEAD: head_outputs(record)}

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        directory, training, teacher = Path(self.cfg.data), split == self.cfg.train_subset, None
        if training and self.cfg.teacher is not None:
            shape = outputs_shape(directory, split, self.record)
            teacher = read_teacher(Path(self.cfg.teacher), (shape[0] * shape[1],)).reshape(shape)
        self.datasets[split] = self.rows_of(directory, split, self.record, training, teacher)

    def rows_of(
        self, directory: Path, split: str, record: dict[str, Any], training: bool, teacher: np.ndarray | None
    ) -> LabeledTexts:
        """Return the rows of a prepared directory, and log their number."""
        rows = LabeledTexts(
            directory,
            split,
            record,
            self.cfg.tokens_per_text,
            self.cfg.separator_token,
            seed=self.cfg.seed,
            training=training,
            teacher=teacher,
        )
        cut = f"; {rows.num_cut:,} of more than {self.cfg.tokens_per_text} tokens are cut" if rows.num_cut else ""
        logger.info(f"{rows.source}: {len(rows):,} rows{cut}")
        return rows

    def gold_weight(self, update: int) -> float:
        """Return lambda of the update after ``update`` others: the fixed one, or ``update / max_update``."""
        return update / self.cfg.max_update if self.fixed_gold_weight is None else self.fixed_gold_weight

    def before_step(self, sample: dict[str, Any], criterion: Any, update_num: int) -> dict[str, Any]:
        criterion.gold_weight = self.gold_weight(update_num)
        return sample


def vocabulary_of(directories: Sequence[Path], separator: int | None) -> tuple[Vocabulary, Dictionary]:
    """Return the vocabulary of prepared directories, and its dictionary."""
    tokenizer = str(directories[0] / TOKENIZER_DIRECTORY)
    return open_vocabulary([directory / "input0" for directory in directories], tokenizer, separator)


def parse_gold_weight(cfg: TextClassificationConfig) -> float | None:
    """Return the fixed lambda, 1 without a teacher; None for an annealed one."""
    is_annealed = cfg.gold_weight == ANNEALED
    if cfg.teacher is None and is_annealed:
        return 1.0
    if cfg.teacher is None or (is_annealed and cfg.max_update <= 0):
        raise UserError(f"--gold-weight {cfg.gold_weight} needs {'--max-update' if is_annealed else '--teacher'}")
    if is_annealed:
        return None
    try:
        return finite_number(float(cfg.gold_weight), 0, 1)
    except ValueError as error:
        raise UserError(f"--gold-weight {cfg.gold_weight}: give {ANNEALED}, or a number from 0 to 1") from error


def outputs_shape(directory: Path, split: str, record: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and outputs of a task."""
    return len(read_targets(directory, split, record)), record["num_classes"]


def read_teacher(path: Path, shape: tuple[int]) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # which compares the file's size with its shape
        is_whole = array.dtype == np.float32 and array.shape == shape and np.isfinite(array).all()
    except (OSError, ValueError, EOFError, AttributeError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: give predictions for these rows as .npy, finite float32 numbers {list(shape)}")
    return np.array(array)


def text_loss(
    kind: str, logits: Tensor, labels: Mapping[str, Tensor], deviation: float = 1.0, gold_weight: float = 1.0
) -> Tensor:
    """Return the sum over rows of l(lambda y + (1 - lambda) t, output), nats; a float32 scalar (thesis, section 3.2.2).

    y is the label of a row, t the prediction of its teacher; without teachers, lambda is 1.

        classes: l = -sum_c q_c log softmax(logits)_c, where q is lambda onehot(y) + (1 - lambda) t
        labels:  l = mean over all labels of BCE(logit, q)
        number:  l = ((output - q) / deviation)^2

    Args:
        kind: classes, labels or number.
        logits: [B, outputs] float32; of a number in its unit.
        labels: ``target`` and, with teachers, ``teacher``: what
            ``amos_fairseq.downstream.texts.dataset.LabeledTexts.labels_of`` returns.
        deviation: that of the numbers of the training set, or the range that they are scaled by.
        gold_weight: lambda.
    """
    target, teacher = labels["target"], labels.get("teacher")
    if kind == "classes":
        # The loss is linear in q: with lambda = 1 it has the bits of a loss without teacher.
        loss = cross_entropy(logits, target, ignore_index=UNKNOWN_CLASS, reduction="sum")
        if teacher is None:
            return loss
        return gold_weight * loss + (1 - gold_weight) * cross_entropy(logits, teacher.to(logits), reduction="sum")
    if teacher is not None:
        teacher = teacher if kind == "labels" else teacher[:, 0]
        target = gold_weight * target.double() + (1 - gold_weight) * teacher
    if kind == "labels":
        return binary_cross_entropy_with_logits(logits, target.float(), reduction="sum") / logits.size(1)
    return mse_loss(logits[:, 0] / deviation, target.float() / deviation, reduction="sum")


@register_criterion("text_classification")
class TextClassificationCriterion(LabeledCriterion):
    """L = 1/B sum_b l(row b), nats, with l of ``text_loss``; B is the number of rows of an update.

    Without teachers these are the losses of Hugging Face's models for sequence classification, which do not divide the square
    of a number. In validation the scores of ``text_scores`` are computed from all rows. A class that the training set lacks has
    no loss, counts in B, and is wrong.

    Attributes:
        gold_weight: lambda of the next update, which the task sets.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.kind, self.deviation = task.record["kind"], task.record.get("deviation", 1.0)
        self.gold_weight = 1.0

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        logits, _ = model(**sample["net_input"], classification_head_name=TEXT_HEAD)
        logits = logits.float()  # [B, outputs]
        loss = text_loss(self.kind, logits, sample, self.deviation, self.gold_weight)
        num_rows = sample["nsentences"]
        log = {"loss": loss.detach(), "ntokens": sample["ntokens"], "nsentences": num_rows, "sample_size": num_rows}
        if "teacher" in sample:
            log["_gold_weight"] = self.gold_weight * num_rows
        if not model.training:
            log[f"_{self.kind}"] = sum_to_score(self.kind, logits, sample)
        return loss, num_rows, log

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss over all ranks and accumulated batches and, in validation, the scores of all rows so far."""
        totals = log_means(logging_outputs, "loss", "_gold_weight")
        for kind in SCORES:
            if (key := f"_{kind}") in totals:
                metrics.log_scalar_sum(key, totals[key].cpu())
                scores = scores_of(key, kind)
                for name in SCORES[kind]:
                    metrics.log_derived(name, lambda meters, name=name, scores=scores: round(scores(meters)[name], 4))


def sum_to_score(kind: str, logits: Tensor, rows: Mapping[str, Any]) -> Tensor:
    """Return what the scores are computed from after a sum over batches and ranks: of labels ``label_counts``; else
    predictions, targets and ones at the places of their rows, 0 elsewhere, [3, num_rows] float64.

    Each row is in one batch of one rank, so the sum has all rows: a rank correlation cannot be computed from less.

    Args:
        logits: [B, outputs].
        rows: ``target`` and ``id`` [B] int64, the places among all ``num_rows`` rows of the data set.
    """
    predictions, targets = predictions_of(kind, logits.detach().float()), rows["target"]
    if kind == "labels":
        return label_counts(predictions, targets)
    placed = predictions.new_zeros(3, rows["num_rows"], dtype=torch.float64)
    values = torch.stack([predictions.double(), targets.double(), torch.ones_like(targets, dtype=torch.float64)])
    return placed.index_copy(1, rows["id"], values)


def scores_of(key: str, kind: str) -> Callable[[Any], dict[str, float]]:
    """Return the function from meters to the scores of the sum under ``key``, which are computed once for each sum.

    They are 0 before the first row: the first batches of a validation may lack rows of some tasks.
    """
    last: tuple[Any, dict[str, float]] = None, {}  # the sum, and its scores

    def scores(meters: Any) -> dict[str, float]:
        nonlocal last
        total = meters[key].sum
        if last[0] is not total:
            last = total, scores_of_sum(kind, total.numpy())
        return last[1]

    return scores


def scores_of_sum(kind: str, total: np.ndarray) -> dict[str, float]:
    if kind == "labels":
        return label_scores(total)
    predictions, targets, present = total
    if not (rows := present > 0).any():
        return dict.fromkeys(SCORES[kind], 0.0)
    dtype = np.int64 if kind == "classes" else np.float64
    return text_scores(kind, predictions[rows].astype(dtype), targets[rows].astype(dtype))
