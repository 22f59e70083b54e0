"""The objective of several tasks of texts at once, each with its own head (thesis, chapter 3)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.downstream.classification.criterion import place_rows, scores_of, sum_logs, text_loss
from amos_fairseq.downstream.classification.dataset import KINDS
from amos_fairseq.downstream.classification.scores import (
    AVERAGE,
    average_score,
    label_counts,
    main_score,
    predictions_of,
)

LOSS, ROWS = "loss_", "_rows_"  # and the name of a task


@register_criterion("multi_task")
class MultiTaskCriterion(FairseqCriterion):
    """L = 1/B sum_b l(row b), nats, with l of :func:`~amos_fairseq.downstream.classification.criterion.text_loss` for
    the task that row b is of; B is the number of rows of an update (thesis, section 3.2).

    Tasks have no weights: their shares of an update are those of
    ``MixedTasks``. Numbers are scaled to 0 to 1. In validation the main score of each task
    and their ``average`` (:func:`~amos_fairseq.downstream.classification.scores.average_score`) are computed from all rows.

    Departures: the thesis sums over rows, which Adam does not see, except for its epsilon and the clipping.

    Attributes:
        gold_weight: lambda of the next update, which the task sets.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.text_tasks, self.gold_weight = task.text_tasks, 1.0
        mains = (f"{main_score(name, own.kind)}_{name}" for name, own in self.text_tasks.items())
        self.of_validation = (AVERAGE, *mains)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of rows, and the sums to log."""
        logits, labels = model(**sample["net_input"]), sample["labels"]
        places, num_rows = sample["net_input"]["rows_of_heads"], sample["nsentences"]
        log = {"ntokens": sample["ntokens"], "nsentences": num_rows, "sample_size": num_rows}
        losses = []
        for name, task in self.text_tasks.items():
            deviation = 1.0 if task.scale is None else task.scale[1]
            own = text_loss(task.kind, logits[name].float(), labels[name], deviation, self.gold_weight)
            losses.append(own)
            log |= {f"{LOSS}{name}": own.detach(), f"{ROWS}{name}": len(places[name])}
            if "teacher" in labels[name]:
                log["_gold_weight"] = self.gold_weight * num_rows
        loss = torch.stack(losses).sum()
        log["loss"] = loss.detach()
        if not model.training:
            log |= self._predictions(logits, labels)
        return loss, num_rows, log

    def _predictions(self, logits: dict[str, Tensor], labels: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
        """Return, for each task, what its scores are computed from, as sums over batches and ranks."""
        sums = {}
        for name, task in self.text_tasks.items():
            own, predictions = labels[name], predictions_of(task.kind, logits[name].detach().float())
            if task.kind == "labels":
                sums[f"_labels_{name}"] = label_counts(predictions, own["target"])
            else:
                sums[f"_{task.kind}_{name}"] = place_rows(predictions, own["target"], own["id"], own["num_rows"])
        return sums

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss of all rows and of each task's and, in validation, the scores of all rows so far."""
        totals = sum_logs(logging_outputs)
        scores: dict[str, Callable[[Any], float]] = {}
        for key, total in totals.items():
            if key.startswith(LOSS):
                count = float(totals[f"{ROWS}{key.removeprefix(LOSS)}"])
                metrics.log_scalar(key, mean(total, count), count, round=4)
            for kind in (kind for kind in KINDS if key.startswith(f"_{kind}_")):
                metrics.log_scalar_sum(key, total.cpu())
                name = key.removeprefix(f"_{kind}_")
                scores[name] = log_main_score(key, name, kind)
        if scores:
            metrics.log_derived(AVERAGE, lambda meters: round(average_of(scores, meters), 4))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def average_of(scores: Mapping[str, Callable[[Any], float]], meters: Any) -> float:
    """Return the mean of the scores, functions of the meters by task; see
    :func:`~amos_fairseq.downstream.classification.scores.average_score`."""
    return average_score({name: score(meters) for name, score in scores.items()})


def log_main_score(key: str, name: str, kind: str) -> Callable[[Any], float]:
    """Log the main score of a task, and return it as a function of the meters."""
    main, scores = main_score(name, kind), scores_of(key, kind)

    def score(meters: Any) -> float:
        return round(scores(meters)[main], 4)

    metrics.log_derived(f"{main}_{name}", score)
    return score
