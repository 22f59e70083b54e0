"""The objective of texts with a class, several labels, or a number."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.downstream.classification.dataset import UNKNOWN_CLASS
from amos_fairseq.downstream.classification.scores import (
    SCORES,
    label_counts,
    label_scores,
    predictions_of,
    text_scores,
)
from amos_fairseq.models.fine_tuning import TEXT_HEAD


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
            :meth:`~amos_fairseq.downstream.classification.dataset.LabeledTexts.labels_of` returns.
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
class TextClassificationCriterion(FairseqCriterion):
    """L = 1/B sum_b l(row b), nats, with l of :func:`text_loss`; B is the number of rows of an update.

    Without teachers these are the losses of Hugging Face's models for sequence classification; there the square of a number is
    not divided. In validation the scores of ``text_scores`` are computed from all rows. A
    class that the training set lacks has no loss, counts in B, and is wrong.

    Attributes:
        gold_weight: lambda of the next update, which the task sets.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.kind, self.deviation = task.record["kind"], task.record.get("deviation", 1.0)
        self.of_validation = SCORES[self.kind]  # what is not logged in training
        self.gold_weight = 1.0

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of rows, and the sums to log."""
        logits, _ = model(**sample["net_input"], classification_head_name=TEXT_HEAD)
        logits, target = logits.float(), sample["target"]  # [B, outputs]
        loss = text_loss(self.kind, logits, sample, self.deviation, self.gold_weight)
        num_rows = sample["nsentences"]
        log = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": num_rows,
            "sample_size": num_rows,
        }
        if "teacher" in sample:
            log["_gold_weight"] = self.gold_weight * num_rows
        if not model.training:
            predictions = predictions_of(self.kind, logits.detach())
            if self.kind == "labels":
                log["_label_counts"] = label_counts(predictions, target)
            else:
                log[f"_{self.kind}"] = place_rows(predictions, target, sample["id"], sample["num_rows"])
        return loss, num_rows, log

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss over all ranks and accumulated batches and, in validation, the scores of all rows so far."""
        totals = sum_logs(logging_outputs)
        for key, kind in (("_label_counts", "labels"), ("_classes", "classes"), ("_number", "number")):
            if key in totals:
                metrics.log_scalar_sum(key, totals[key].cpu())
                log_scores(key, kind)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def sum_logs(logging_outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all ranks and accumulated batches, and log the mean ``loss`` and, with teachers, ``gold_weight``."""
    totals = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
    num_rows = float(totals["sample_size"])
    metrics.log_scalar("loss", mean(totals["loss"], num_rows), num_rows, round=4)
    if "_gold_weight" in totals:
        metrics.log_scalar("gold_weight", mean(totals["_gold_weight"], num_rows), num_rows, round=4)
    return totals


def place_rows(predictions: Tensor, targets: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return predictions, targets and ones at the places of their rows, 0 elsewhere: [3, num_rows] float64.

    The sum over batches and ranks, whose rows differ, has all of them: a rank correlation is no function of smaller sums.

    Args:
        predictions, targets: [B].
        rows: [B] int64, places among all rows.
        num_rows: of the data set.
    """
    placed = predictions.new_zeros(3, num_rows, dtype=torch.float64)
    values = torch.stack([predictions.double(), targets.double(), torch.ones_like(targets, dtype=torch.float64)])
    return placed.index_copy(1, rows, values)


def log_scores(key: str, kind: str) -> None:
    """Log the scores of the sum under ``key``."""
    scores = scores_of(key, kind)
    for name in SCORES[kind]:
        metrics.log_derived(name, lambda meters, name=name: round(scores(meters)[name], 4))


def scores_of(key: str, kind: str) -> Callable[[Any], dict[str, float]]:
    """Return the function from meters to the scores of the sum under ``key``, which are computed once for each sum.

    They are 0 before the first row: of several tasks some have none in the first batches of a validation.
    """
    computed: list[Any] = [None, {}]  # the sum, and its scores

    def scores(meters: Any) -> dict[str, float]:
        total = meters[key].sum
        if computed[0] is not total:
            if kind == "labels":
                computed[:] = total, label_scores(total.numpy())
            else:
                predictions, targets, present = total.numpy()
                dtype = np.int64 if kind == "classes" else np.float64
                rows = present > 0
                if not rows.any():
                    return dict.fromkeys(SCORES[kind], 0.0)
                computed[:] = total, text_scores(kind, predictions[rows].astype(dtype), targets[rows].astype(dtype))
        return computed[1]

    return scores
