"""The objective of AMOS."""

from typing import Any

from fairseq import metrics
from fairseq.criterions import register_criterion
from torch import Tensor

from amos_fairseq.criterions.pretraining import (
    DetectionWithMlmLossConfig,
    PretrainingCriterion,
    batch_counts,
    detection_terms,
    encoder_mlm_terms,
    mean,
    temperature_sum,
)
from amos_fairseq.functional.mixture import mixture_entropy
from amos_fairseq.models.pretraining import PretrainingBatch


@register_criterion("amos", dataclass=DetectionWithMlmLossConfig)
class AmosCriterion(PretrainingCriterion):
    """L_GEN + lambda L_DISC (AMOS Eq. 1, 2 and 4).

        L_GEN  = 1/|M| sum_{i in M} sum_{d in D} -log p_MLM(x_i | h_i^(d))                                       (Eq. 2)
        L_DISC = 1/n sum_i -[x_i^rep = x_i] log(1 - r_i) - [x_i^rep != x_i] log r_i,  r_i = sigmoid(logit_i)     (Eq. 1)

        theta_GEN, v = argmin (L_GEN - lambda L_DISC),   theta_DISC = argmin L_DISC                              (Eq. 4)

    over the masked positions M and the n real tokens of a batch. "- lambda L_DISC" is the gradient reversal inside the model
    (``amos_fairseq.models.amos.AmosModel``), so lambda is applied once, here. L_GEN = 0 for a frozen generator.

    1/|M| and 1/n are our reading: the paper prints the expectation of a sum over the tokens of a text, E(sum_i ...). Here both
    terms are means over tokens, as in ELECTRA's released code, where 50 weighs two means as well; of two sums, L_DISC would
    have n / |M| = 6.7 times its weight.

    Shapes: B sequences, T tokens, M masked positions per sequence, K depths.

    Departures: the logits are positive for "replaced"; Eq. 1 writes the probability of "original". fairseq divides the
    summed gradient by the summed sample size, the number of masked positions; therefore the detection sum is multiplied
    by the constant ceil(mask_prob T) / T instead of a batch's own |M| / n, and sums over ranks and accumulated batches
    are exact (the weight of a block that is not full is its own number of tokens).
    """

    COUNTED_BY = {"main_loss": "_predicted", "main_acc": "_predicted"}

    def __init__(self, task, discriminator_loss_weight: float, encoder_mlm_weight: float = 0.0):
        super().__init__(task)
        self.discriminator_loss_weight = discriminator_loss_weight
        self.encoder_mlm_weight = encoder_mlm_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        batch = PretrainingBatch.of(sample)
        output = model(batch)
        is_masked = batch.masked_weights.float()  # [B,M]
        is_real = batch.tokens.ne(self.padding_idx)  # [B,T]

        mlm_losses = (output.mlm_nll * is_masked).sum((1, 2))  # [K]
        rtd_loss, detection = detection_terms(output, output.replaced, is_real, is_real, self.training)
        generator_loss = mlm_losses.sum() if output.learns_by_likelihood else 0.0
        loss = generator_loss + self.discriminator_loss_weight * self.task.masked_share * rtd_loss

        prediction: dict[str, Tensor] = {}
        if output.predictions is not None:
            main_loss, prediction = encoder_mlm_terms(output.predictions)
            loss = loss + self.encoder_mlm_weight * main_loss

        logging_output = {
            "loss": loss.detach(),
            **batch_counts(sample),
            **temperature_sum(output.generator_temperature, sample),
            **mixture_sums(model.depth_names, output, mlm_losses.detach(), is_masked),
            **truncated_mass_sums(output.truncated_mass),
            **detection,
            **prediction,
        }
        return loss, sample["num_masked"], logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the keys of the objective and ``gumbel_residual``, the mass of y outside the entries that carry its gradient."""
        super().reduce_metrics(logging_outputs)
        if "gumbel_residual" in logging_outputs[0]:
            total, count = (sum(log[key] for log in logging_outputs) for key in ("gumbel_residual", "_measured"))
            metrics.log_scalar("gumbel_residual", mean(total, count), count, round=8)


def mixture_sums(names: list[str], output, mlm_losses: Tensor, is_masked: Tensor) -> dict[str, Tensor]:
    """Compute sums over masked positions: loss, accuracy and mixture weight of each depth, and the mixture's entropy."""
    gamma = output.mixture_weights.detach()  # [B,M,K]
    correct = (output.mlm_correct * is_masked).sum((1, 2))  # [K]
    weights = (gamma * is_masked.unsqueeze(-1)).sum((0, 1))  # [K]
    sums = {"mixture_entropy": (mixture_entropy(gamma) * is_masked).sum()}
    for depth, name in enumerate(names):
        sums[f"mlm_loss_{name}"] = mlm_losses[depth]
        sums[f"mlm_acc_{name}"] = correct[depth]
        sums[f"mixture_{name}"] = weights[depth]
    return sums


def truncated_mass_sums(gumbel_residual: Tensor | None) -> dict[str, Any]:
    """Sum over the positions where it was measured; return {} if the gradient is exact, or there is none."""
    if gumbel_residual is None:
        return {}
    return {"gumbel_residual": gumbel_residual.sum(), "_measured": len(gumbel_residual)}
