"""The objective of texts with a class, several labels, or a number."""

from typing import Any

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.labeled_texts import UNKNOWN_CLASS
from amos_fairseq.data.text_scores import SCORES, label_counts, label_scores, predictions_of, text_scores
from amos_fairseq.models.fine_tuning import TEXT_HEAD


@register_criterion("text_classification")
class TextClassificationCriterion(FairseqCriterion):
    """L = 1/B sum_b l(row b), nats; B is the number of rows of an update.

    classes: l = -log softmax(logits)[class]
    labels:  l = mean over all labels of BCE(logit, 1 if the row has the label else 0)
    number:  l = ((output - value) / deviation)^2, where deviation is that of the training set

    They are the losses of Hugging Face's models for sequence classification; there the square is not divided. In validation the
    scores of :func:`~amos_fairseq.data.text_scores.text_scores` are computed from all rows. A class that the training set
    lacks has no loss, counts in B, and is wrong.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.kind, self.deviation = task.record["kind"], task.record.get("deviation", 1.0)
        self.of_validation = SCORES[self.kind]  # what is not logged in training

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of rows, and the sums to log."""
        logits, _ = model(**sample["net_input"], classification_head_name=TEXT_HEAD)
        logits, target = logits.float(), sample["target"]  # [B, outputs]
        if self.kind == "classes":
            loss = cross_entropy(logits, target, ignore_index=UNKNOWN_CLASS, reduction="sum")
        elif self.kind == "labels":
            loss = binary_cross_entropy_with_logits(logits, target.float(), reduction="sum") / logits.size(1)
        else:
            loss = mse_loss(logits[:, 0] / self.deviation, target.float() / self.deviation, reduction="sum")
        num_rows = sample["nsentences"]
        log = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": num_rows,
            "sample_size": num_rows,
        }
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
        totals = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
        num_rows = float(totals["sample_size"])
        metrics.log_scalar("loss", mean(totals["loss"], num_rows), num_rows, round=4)
        for key, kind in (("_label_counts", "labels"), ("_classes", "classes"), ("_number", "number")):
            if key in totals:
                metrics.log_scalar_sum(key, totals[key].cpu())
                log_scores(key, kind)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


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
    """Log the scores of the sum under ``key``, which are computed once for each number of rows."""
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
                computed[:] = total, text_scores(kind, predictions[rows].astype(dtype), targets[rows].astype(dtype))
        return computed[1]

    for name in SCORES[kind]:
        metrics.log_derived(name, lambda meters, name=name: round(scores(meters)[name], 4))
