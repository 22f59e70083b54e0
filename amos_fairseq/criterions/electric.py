"""The objective of Electric, ELECTRA-TT and TwoTower."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from omegaconf import II
from torch import Tensor

from amos_fairseq.criterions.pretraining import (
    DetectionLossConfig,
    PretrainingCriterion,
    batch_counts,
    detection_terms,
    log_sums,
)
from amos_fairseq.models.pretraining import PretrainingBatch


@dataclass
class ElectricLossConfig(DetectionLossConfig):
    """The weight of the noise classifier, and the model's choice of tokens that train the generator."""

    generator_loss_tokens: str = II("model.generator_loss_tokens")


@register_criterion("electric", dataclass=ElectricLossConfig)
class ElectricCriterion(PretrainingCriterion):
    """L_GEN + lambda L_NCE (thesis section 5.1: Algorithm 2, and maximum likelihood for the generator, 5.1.5).

        L_GEN = 1/|R| sum_{t in R} -log q(x_t | x without t)
        L_NCE = 1/n sum_t -log D(x_noised)_t where t in R, -log(1 - D(x_noised)_t) elsewhere
        D(x)_t = sigmoid(E(x)_t + log q(x_t | x without t) + log(p / (1 - p)))       (5.1.5, with k / n as in Algorithm 2)

    over the sampled positions R and the n tokens of a batch; p is the task's mask_prob, and q is detached in D.
    ELECTRA-TT has D(x)_t = sigmoid(E(x)_t); so has ``electra_labels``, with the tokens that were replaced by another one
    instead of R (the control of 5.4.4); TwoTower has L_GEN alone, over all tokens. The sums exclude special tokens.
    The constant ceil(mask_prob T) / T puts sums over all tokens on the scale of sums over sampled positions, as in
    ``AmosCriterion``. Shapes: B sequences, T tokens, M sampled positions per sequence.

    R in L_GEN is the thesis's choice ("after predicting the identities of the tokens selected to be replaced", 5.1.5). The
    authors' code sums over all tokens: --generator-loss-tokens all. That has 1 / p as many targets and no further forward
    pass, since NCE needs q of every token, but a backward pass of the output layer at every token instead of a share p. R is
    the default, because it is what the paper says and what ELECTRA's generator learns from.

    Departures: Algorithm 2, step 4, prints its two cases exchanged. p / (1 - p) replaces the odds k / (n - k) of a text;
    k counts special tokens and is rounded up, so p is slightly below the share of noise among the tokens that are not
    special. A sampled token that equals the original is noise, here and in ELECTRA-TT, whose scores (5.4.5) hold for these
    labels only. The sums exclude special tokens, their divisor includes them; ELECTRA's own include them, which makes
    ``electra_labels`` differ from ``ElectraCriterion`` at <s>, </s> and <unk>.
    """

    def __init__(self, task, discriminator_loss_weight: float, generator_loss_tokens: str):
        super().__init__(task)
        self.discriminator_loss_weight = discriminator_loss_weight
        self.all_tokens_train_generator = generator_loss_tokens == "all"

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        batch = PretrainingBatch.of(sample)
        output = model(batch)
        masked_weights = batch.masked_weights  # [B,M]
        is_target = (output.is_scored if self.all_tokens_train_generator else masked_weights).float()  # [B,M] or [B,T]

        mlm_loss = (output.mlm_nll * is_target).sum()
        loss = mlm_loss * self.task.masked_share if self.all_tokens_train_generator else mlm_loss
        detection: dict[str, Tensor] = {}
        if output.rtd_logits is not None:
            is_scored = output.is_scored
            rtd_loss, detection = detection_terms(output, output.is_noise, is_scored, is_scored, self.training)
            loss = loss + self.discriminator_loss_weight * self.task.masked_share * rtd_loss
            detection["_changed"] = output.replaced.sum()

        (depth,) = model.depth_names
        logging_output = {
            "loss": loss.detach(),
            f"mlm_loss_{depth}": mlm_loss.detach(),
            f"mlm_acc_{depth}": (output.mlm_correct * is_target).sum(),
            "_targets": is_target.sum(),
            **batch_counts(sample),
            **detection,
        }
        return loss, sample["num_masked"], logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the keys of the objective; the generator's are means over the tokens that train it."""
        log_sums(logging_outputs, {key: "_targets" for key in logging_outputs[0] if key.startswith("mlm_")})
