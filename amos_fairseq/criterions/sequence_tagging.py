"""The objective of sequence tagging."""

from collections import Counter
from typing import Any

from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.tag_scores import count, scores
from amos_fairseq.data.tagging import NO_LABEL


@register_criterion("sequence_tagging")
class SequenceTaggingCriterion(FairseqCriterion):
    """L = -1/W sum_w log p(label of word w | state of its first piece), nats; p is a softmax over all labels.

    W is the number of words in an update, as in Hugging Face's models for token classification. The log has the scores of
    ``amos tag`` (:mod:`amos_fairseq.data.tag_scores`), where words that are cut are wrong.
    """

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of words, and the sums to log."""
        logits = model(**sample["net_input"])  # [B,W,labels]
        target = sample["target"]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="sum")
        num_words = sample["nwords"]
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": num_words,
        }
        return loss, num_words, logging_output | self._counts(logits, sample)

    def _counts(self, logits: Tensor, sample: dict) -> Counter[str]:
        labels, has_spans = self.task.labels, self.task.has_spans
        kept = sample["target"].ne(NO_LABEL).sum(1).tolist()
        counts: Counter[str] = Counter()
        for gold, row, num_kept in zip(sample["labels"], logits.argmax(-1).tolist(), kept, strict=True):
            counts.update(count([labels[i] for i in gold], [labels[i] for i in row[:num_kept]], has_spans))
        return counts

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss and the scores over all ranks and accumulated batches."""
        totals = {key: float(sum(log.get(key, 0) for log in logging_outputs)) for key in logging_outputs[0]}
        num_words = totals["sample_size"]
        metrics.log_scalar("loss", mean(totals["loss"], num_words), num_words, round=4)
        counted = [key for key in totals if key not in ("loss", "ntokens", "nsentences", "sample_size")]
        for key in counted:
            metrics.log_scalar_sum(f"_{key}", totals[key])

        def score(name: str):
            return lambda meters: round(scores({key: meters[f"_{key}"].sum for key in counted})[name], 2)

        for name in scores({key: totals[key] for key in counted}):
            metrics.log_derived(name, score(name))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
