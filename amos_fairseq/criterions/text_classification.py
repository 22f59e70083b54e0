"""The objective of texts with a class, several labels, or a number."""

from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.labeled_texts import UNKNOWN_CLASS
from amos_fairseq.data.text_scores import SCORES, predictions_of, text_scores
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
        """Return the summed loss (float32 scalar), the number of rows, and what to log: sums and, in validation, the
        predictions and targets of all rows."""
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
            log |= {"predictions": predictions_of(self.kind, logits.detach()), "targets": target, "kind": self.kind}
        return loss, num_rows, log

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss over all ranks and accumulated batches and, in validation, the scores of all rows so far."""
        num_rows = float(sum(log["sample_size"] for log in logging_outputs))
        loss = float(sum(log["loss"] for log in logging_outputs))
        metrics.log_scalar("loss", mean(loss, num_rows), num_rows, round=4)
        if "kind" not in logging_outputs[0]:
            return
        kind = logging_outputs[0]["kind"]
        for name in ("predictions", "targets"):
            # A tensor of one element has become a number (compat.device_reads).
            rows = [torch.as_tensor(log[name]).reshape(int(log["nsentences"]), -1) for log in logging_outputs]
            metrics.log_concat_tensor(f"_{name}", torch.cat(rows))

        computed: dict[int, dict[str, float]] = {}  # by the number of rows: fairseq asks for one score after the other

        def scores(meters: Any) -> dict[str, float]:
            rows = [meters[f"_{name}"].tensor.numpy() for name in ("predictions", "targets")]
            if len(rows[0]) not in computed:
                computed.clear()
                own = [each.astype(bool) if kind == "labels" else each[:, 0] for each in rows]
                computed[len(rows[0])] = text_scores(kind, *own)
            return computed[len(rows[0])]

        def score(name: str) -> Any:
            return lambda meters: round(scores(meters)[name], 4)

        for name in SCORES[kind]:
            metrics.log_derived(name, score(name))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return False  # rows are concatenated
