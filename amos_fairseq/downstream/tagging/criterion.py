"""The objective of sequence tagging."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.downstream.classification.scores import AVERAGE
from amos_fairseq.downstream.tagging.dataset import NO_LABEL
from amos_fairseq.downstream.tagging.model import WordOutput
from amos_fairseq.downstream.tagging.scores import count, main_score, scores
from amos_fairseq.downstream.views.training import add_cross_views, log_cross_views

SCORED = "_count_"  # and what is counted, and "/" and the column of several


@dataclass
class SequenceTaggingCriterionConfig(FairseqDataclass):
    label_smoothing: float = field(
        default=0.0,
        metadata={
            "range": "0 or more and below 1",
            "help": "in training, this share of a word's label is spread over all labels (thesis, section 4.3.1: 0.1)",
        },
    )


@register_criterion("sequence_tagging", dataclass=SequenceTaggingCriterionConfig)
class SequenceTaggingCriterion(FairseqCriterion):
    """L = -1/W sum_w log p(label of word w | state of its first piece), nats; p is a softmax over all labels.

    W is the number of words in an update, as in Hugging Face's models for token classification. With label smoothing e, the
    target of a word is 1 - e for its label and e / labels for each. With the task's ``--views``,
    :func:`~amos_fairseq.downstream.views.training.add_cross_views` adds another term. The log has the scores of ``amos tag``
    (``scores.py``), where words that are cut are wrong; of several columns each, with its name, and the
    ``average`` of their main scores. Scores are those of validation alone.
    """

    def __init__(self, task: Any, label_smoothing: float) -> None:
        super().__init__(task)
        self.columns, self.label_smoothing = task.columns, label_smoothing
        self.of_validation = scores_of(list(task.columns.values()))

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of words, and the sums to log."""
        output: WordOutput = model(**sample["net_input"])
        smoothing = self.label_smoothing if model.training else 0.0
        parts, losses, counts = sample.get("parts", dict.fromkeys(self.columns, sample)), [], Counter()
        for head, column in self.columns.items():
            logits, target = output.logits[head], parts[head]["target"]  # [B,W,labels], [B,W]
            losses.append(
                cross_entropy(
                    logits.flatten(0, 1),
                    target.flatten(),
                    ignore_index=NO_LABEL,
                    reduction="sum",
                    label_smoothing=smoothing,
                )
            )
            if not model.training:  # an update does not wait for the device
                suffix = f"/{column.name}" if len(self.columns) > 1 else ""
                for name, number in count_right(column, logits, parts[head]).items():
                    counts[f"{SCORED}{name}{suffix}"] = number
        loss, num_words = torch.stack(losses).sum(), sample["nwords"]
        log = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": num_words}
        loss, sums = add_cross_views(loss, output, sample)
        return loss, num_words, log | sums | counts | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss and the scores over all ranks and accumulated batches."""
        totals = {key: float(sum(log.get(key, 0) for log in logging_outputs)) for key in logging_outputs[0]}
        num_words = totals["sample_size"]
        metrics.log_scalar("loss", mean(totals["loss"], num_words), num_words, round=4)
        log_cross_views(totals)
        counted: dict[str, dict[str, str]] = {}  # column -> what is counted -> key
        for key in totals:
            if key.startswith(SCORED):
                metrics.log_scalar_sum(key, totals[key])
                name, _, column = key.removeprefix(SCORED).partition("/")
                counted.setdefault(column, {})[name] = key

        def score(column: str, name: str) -> Callable[[Any], float]:
            keys = counted[column]
            return lambda meters: scores({what: meters[key].sum for what, key in keys.items()})[name]

        mains = []
        for column, keys in counted.items():
            mains.append(score(column, main_score("spans" in keys)))
            for name in scores({what: totals[key] for what, key in keys.items()}):
                compute = score(column, name)
                label = f"{name}_{column}" if column else name
                metrics.log_derived(label, lambda meters, compute=compute: round(compute(meters), 2))
        if len(mains) > 1:
            metrics.log_derived(AVERAGE, lambda meters: round(sum(own(meters) for own in mains) / len(mains), 2))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def scores_of(columns: Sequence[Any]) -> list[str]:
    """Return the names of the scores in the log."""
    if len(columns) == 1:
        return list(scores(count([], [], columns[0].has_spans)))
    return [AVERAGE, *(f"{name}_{own.name}" for own in columns for name in scores(count([], [], own.has_spans)))]


def count_right(column: Any, logits: Tensor, part: dict[str, Any]) -> Counter[str]:
    """Return the sums of :func:`~amos_fairseq.downstream.tagging.scores.count` over sentences.

    Args:
        column: its ``labels`` and ``has_spans``.
        logits: [B,W,labels].
        part: ``labels``, those of all words of each sentence, and ``target`` [B,W].
    """
    kept = part["target"].ne(NO_LABEL).sum(1).tolist()
    counts: Counter[str] = count([], [], column.has_spans)  # the same keys without a sentence
    for gold, row, num_kept in zip(part["labels"], logits.argmax(-1).tolist(), kept, strict=True):
        labels = ([column.labels[i] for i in gold], [column.labels[i] for i in row[:num_kept]])
        counts.update(count(*labels, column.has_spans))
    return counts
