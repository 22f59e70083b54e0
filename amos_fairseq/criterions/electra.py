"""The objective of ELECTRA."""

from typing import Any

from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor

from amos_fairseq.criterions.detection import DetectionLossConfig, detection_loss, detection_sums
from amos_fairseq.criterions.logging import depth_names, log_sums


@register_criterion("electra", dataclass=DetectionLossConfig)
class ElectraCriterion(FairseqCriterion):
    """L_GEN + lambda L_DISC (thesis section 5.1.5: maximum likelihood for the generator, negative sampling for D').

        L_GEN  = 1/|M| sum_{i in M} -log q(x_i | x_masked)
        L_DISC = 1/n sum_t -log D'_t where token t was replaced by another one, -log(1 - D'_t) elsewhere;  D' = sigmoid(E)

    over the masked positions M and the n real tokens of a batch. Labels, signs and the constant that puts the detection sum
    on the scale of masked positions are those of :class:`AmosCriterion`. Shapes: B sequences, T tokens, M masked positions.

    Departures: a sampled token that equals the original counts as original, as in ELECTRA's released code; Algorithm 2 of
    the thesis would call it noise.
    """

    def __init__(self, task, discriminator_loss_weight: float):
        super().__init__(task)
        self.discriminator_loss_weight = discriminator_loss_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """The summed loss (float32 scalar), the number of masked positions, and the sums to log."""
        tokens = sample["net_input"]["tokens"]  # [B,T]
        output = model(**sample["net_input"], has_padding=sample["ntokens"] < tokens.numel())
        is_masked = sample["net_input"]["masked_weights"].float()  # [B,M]
        is_real = tokens.ne(self.padding_idx)  # [B,T]

        mlm_loss = (output.mlm_nll * is_masked).sum()
        rtd_loss = detection_loss(output.rtd_logits, output.replaced, is_real)
        loss = mlm_loss + self.discriminator_loss_weight * self.task.masked_share * rtd_loss

        (depth,) = depth_names(model)
        logging_output = {
            "loss": loss.detach(),
            "rtd_loss": rtd_loss.detach(),
            f"mlm_loss_{depth}": mlm_loss.detach(),
            f"mlm_acc_{depth}": (output.mlm_correct * is_masked).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample["num_masked"],
            **detection_sums(output.rtd_logits.detach(), output.replaced, is_real),
        }
        return loss, sample["num_masked"], logging_output

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the contract's keys from sums over all ranks and accumulated batches."""
        log_sums(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
