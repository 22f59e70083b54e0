"""The objective of dependency parsing."""

from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor
from torch.nn.functional import cross_entropy

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.downstream.parsing.model import TREES
from amos_fairseq.downstream.tagging.dataset import NO_LABEL
from amos_fairseq.downstream.tagging.model import WordOutput
from amos_fairseq.downstream.views.training import add_cross_views, log_cross_views


@register_criterion("dependency_parsing")
class DependencyParsingCriterion(FairseqCriterion):
    """L = -1/W sum_t log p((u, r) of word t), nats; p is one softmax over all heads u and relations r (thesis, section 4.2.3).

    W is the number of words in an update. In validation ``uas`` and ``las`` are those of the most likely edge of each word,
    which may be no tree; ``amos parse`` scores trees. With the task's ``--views``,
    :func:`~amos_fairseq.downstream.views.training.add_cross_views` adds another term.
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
        loss, sums = add_cross_views(loss, output, sample)
        if not model.training:
            log |= self._counts(scores.argmax(-1), target) | {"_words": sample["all_words"]}
        return loss, num_words, log | sums | {"loss": loss.detach()}

    def _counts(self, found: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Count the right heads, and the right heads with the right relation, of pairs [B,W] int64."""
        num_relations = len(self.plain_relations)
        known = target.clamp(min=0)
        right = target.ne(NO_LABEL) & (found // num_relations == known // num_relations)
        own, gold = (self.plain_relations[pairs % num_relations] for pairs in (found, known))
        return {"_heads": right.sum(), "_edges": (right & (own == gold)).sum()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss and, in validation, the scores over all ranks and accumulated batches."""
        totals = {key: float(sum(log[key] for log in logging_outputs)) for key in logging_outputs[0]}
        num_words = totals["sample_size"]
        metrics.log_scalar("loss", mean(totals["loss"], num_words), num_words, round=4)
        log_cross_views(totals)
        if "_words" not in totals:
            return
        for key in ("_words", "_heads", "_edges"):
            metrics.log_scalar_sum(key, totals[key])
        for name, key in (("uas", "_heads"), ("las", "_edges")):
            metrics.log_derived(
                name, lambda meters, key=key: round(100 * mean(meters[key].sum, meters["_words"].sum), 2)
            )

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
