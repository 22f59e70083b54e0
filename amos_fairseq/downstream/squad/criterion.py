"""The objective of answer spans."""

from dataclasses import dataclass, field
from typing import Any

from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.downstream.squad.model import SpanOutput


@dataclass
class SquadCriterionConfig(FairseqDataclass):
    answerable_loss_weight: float = field(
        default=0.5,
        metadata={
            "range": "0 or more",
            "help": "weight of the answerability classifier, where the head has one (XLNet: 0.5)",
        },
    )


@register_criterion("squad", dataclass=SquadCriterionConfig)
class SquadCriterion(FairseqCriterion):
    """L = 1/B sum_b [ -1/2 (log p(s_b) + log p(e_b)) + w BCE(u_b, [window b holds no answer]) ], nats.

    s and e are the answer's first and last position, both 0 (``<s>``) in a window without it; p is a softmax over the
    context tokens and ``<s>``; the joint head predicts the end given the true start. u is the joint head's classifier; the
    independent head has no such term. B is the number of windows in a batch; fairseq divides by that of an update.

    Departure: ELECTRA's released code gives the classifier one label per question; here it is one per window, as in XLNet.
    """

    def __init__(self, task, answerable_loss_weight: float):
        super().__init__(task)
        self.answerable_loss_weight = answerable_loss_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of windows, and the sums to log."""
        output: SpanOutput = model(**sample["net_input"])
        starts, ends = sample["net_input"]["span_targets"]  # [B]
        start_loss = cross_entropy(output.start_logits, starts, reduction="sum")
        end_loss = cross_entropy(output.end_logits, ends, reduction="sum")
        loss = (start_loss + end_loss) / 2
        start_correct = output.start_logits.argmax(-1).eq(starts)
        end_correct = output.end_logits.argmax(-1).eq(ends)
        num_windows = sample["nsentences"]
        logging_output = {
            "span_loss": loss.detach(),
            "start_acc": start_correct.sum(),
            "end_acc": end_correct.sum(),
            "span_acc": (start_correct & end_correct).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": num_windows,
            "sample_size": num_windows,
        }
        if output.unanswerable_logits is not None:
            unanswerable = starts.eq(0)
            answerable_loss = binary_cross_entropy_with_logits(
                output.unanswerable_logits, unanswerable.float(), reduction="sum"
            )
            loss = loss + self.answerable_loss_weight * answerable_loss
            logging_output["answerable_loss"] = answerable_loss.detach()
            logging_output["answerable_acc"] = (output.unanswerable_logits > 0).eq(unanswerable).sum()
        return loss, num_windows, logging_output | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the windows of all ranks and accumulated batches."""
        totals = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
        count = float(totals["sample_size"])
        for key in totals:
            if key not in ("ntokens", "nsentences", "sample_size"):
                metrics.log_scalar(key, mean(totals[key], count), count, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
