"""The objective of TEAMS."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from omegaconf import II
from torch import Tensor

from amos_fairseq.criterions.pretraining import PretrainingCriterion, batch_counts, detection_terms
from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.setting_checks import setting


@dataclass
class TeamsCriterionConfig(FairseqDataclass):
    """The other two weights are the model's, which has no branch for a weight of 0."""

    mlm_loss_weight: float = setting(1.0, "weight of the generator's loss (1: TEAMS Eq. 9)", "0 or more")
    rtd_loss_weight: float = II("model.rtd_loss_weight")
    mws_loss_weight: float = II("model.mws_loss_weight")


@register_criterion("teams", dataclass=TeamsCriterionConfig)
class TeamsCriterion(PretrainingCriterion):
    """L_MLM + lambda_1 L_RTD + lambda_2 L_MWS (TEAMS Eq. 9).

        L_MLM = 1/|M| sum_{i in M} -log P_G(x_i | x^M)                                                            (Eq. 1)
                with P_G(x_i | x^M) = softmax over the vocabulary of e(x') . h_G(x^M)_i at x' = x_i               (Eq. 2)
        L_RTD = 1/n sum_{i: x_i^R = x_i} -log P_D(x_i^R = x_i) + 1/n sum_{i: x_i^R != x_i} -log(1 - P_D(x_i^R = x_i))
                with P_D(x_i^R = x_i) = sigmoid(-logit_i)                                                (Eq. 3, 4 and 6)
        L_MWS = 1/|M| sum_{i in M} -log P_D(x_i | x^R, S_i)                                                       (Eq. 8)
                with P_D(x_i | x^R, S_i) = softmax over S_i of e(x') . h_MWS(x^R)_i at x' = x_i             (Eq. 5 and 7)

    over the masked positions M and the n real tokens of a batch; S_i contains x_i and K other tokens. Shapes: B sequences,
    T tokens, M masked positions per sequence, K negatives.

    Departures: Eq. 1, 4 and 8 are sums over a text; here each is the mean over its own positions, for which the weights 1, 5
    and 2 put them on one scale as Appendix B says. Labels, signs and the constant that puts the detection sum on the scale
    of masked positions are those of ``AmosCriterion``. A term of weight 0 is not computed.
    """

    COUNTED_BY = {"mws_loss": "sample_size", "mws_acc": "sample_size"}

    def __init__(self, task, mlm_loss_weight: float, rtd_loss_weight: float, mws_loss_weight: float):
        super().__init__(task)
        if not mlm_loss_weight > 0:
            raise UserError(f"--mlm-loss-weight {mlm_loss_weight:g} leaves the generator untrained: give more than 0")
        self.mlm_loss_weight = mlm_loss_weight
        self.rtd_loss_weight = rtd_loss_weight
        self.mws_loss_weight = mws_loss_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        batch = PretrainingBatch.of(sample)
        output = model(batch)
        is_masked = batch.masked_weights.float()  # [B,M]
        is_real = batch.tokens.ne(self.padding_idx)  # [B,T]

        mlm_loss = (output.mlm_nll * is_masked).sum()
        loss = self.mlm_loss_weight * mlm_loss
        (depth,) = model.depth_names
        sums = {f"mlm_loss_{depth}": mlm_loss.detach(), f"mlm_acc_{depth}": (output.mlm_correct * is_masked).sum()}
        if self.rtd_loss_weight:
            rtd_loss, detection = detection_terms(output, output.replaced, is_real, is_real, self.training)
            loss = loss + self.rtd_loss_weight * self.task.masked_share * rtd_loss
            sums |= detection
        if self.mws_loss_weight:
            mws_loss = selection_loss(output.mws_logits, is_masked)
            loss = loss + self.mws_loss_weight * mws_loss
            sums["mws_loss"] = mws_loss.detach()
            sums["mws_acc"] = (output.mws_logits.argmax(-1).eq(0) * is_masked).sum()

        return loss, sample["num_masked"], {"loss": loss.detach(), **sums, **batch_counts(sample)}


def selection_loss(logits: Tensor, is_masked: Tensor) -> Tensor:
    """Compute -log P_D(x_i | x^R, S_i) summed over the masked positions, in nats (TEAMS Eq. 5, 7 and 8).

    Args:
        logits: [B,M,1+K] float32 of the candidates, the original first.
        is_masked: [B,M] float, 0 for a padded slot.
    """
    return -(logits.log_softmax(-1)[..., 0] * is_masked).sum()
