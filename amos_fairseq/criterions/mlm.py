"""The objective of masked language models."""

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from torch import Tensor

from amos_fairseq.criterions.pretraining import PretrainingCriterion, batch_counts
from amos_fairseq.models.pretraining import PretrainingBatch


@register_criterion("mlm", dataclass=FairseqDataclass)
class MlmCriterion(PretrainingCriterion):
    """L_MLM = 1/|M| sum_{i in M} -log p(x_i | x_masked)   (BERT's; thesis section 5.1.1, TEAMS Eq. 1)

    over the masked positions M of a batch, with p as in TEAMS Eq. 2; fairseq divides by the number of masked positions.
    Shapes: B sequences, T tokens, M masked positions per sequence.

    Departures: none. The task's ``--mask-treatment`` sets the input at masked positions (80 % ``<mask>``, 10 % random, 10 %
    unchanged by default).
    """

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        batch = PretrainingBatch.of(sample)
        output = model(batch)
        is_masked = batch.masked_weights.float()  # [B,M]
        loss = (output.mlm_nll * is_masked).sum()

        (depth,) = model.depth_names
        logging_output = {
            "loss": loss.detach(),
            f"mlm_loss_{depth}": loss.detach(),
            f"mlm_acc_{depth}": (output.mlm_correct * is_masked).sum(),
            **batch_counts(sample),
        }
        return loss, sample["num_masked"], logging_output
