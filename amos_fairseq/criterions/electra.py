"""The objective of ELECTRA, and those of its variants."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum
from torch import Tensor

from amos_fairseq.criterions.pretraining import (
    DetectionWithMlmLossConfig,
    PretrainingCriterion,
    batch_counts,
    detection_losses,
    detection_terms,
    encoder_mlm_terms,
    temperature_sum,
)
from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import mark_positions, random_positions
from amos_fairseq.functional.replaced_token_detection import baseline_losses, policy_losses
from amos_fairseq.models.electra import ElectraOutput
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.setting_checks import setting


@dataclass
class ElectraCriterionConfig(DetectionWithMlmLossConfig):
    detection_positions: ChoiceEnum(["all", "masked", "random"]) = setting(
        "all",
        "tokens that the detection loss averages over: all, those at masked positions, or as many random ones "
        "(ELECTRA 15 %%, thesis section 5.4.3)",
    )
    # 1: both losses are means in nats over predicted tokens, and train the same token embeddings; no paper gives a value.
    main_loss_weight: float = setting(
        1.0, "weight of the main network's loss, with --main-objective replace_mlm or all_tokens_mlm", "0 or more"
    )


@register_criterion("electra", dataclass=ElectraCriterionConfig)
class ElectraCriterion(PretrainingCriterion):
    """L_GEN + lambda L_DISC (thesis section 5.1.5: maximum likelihood for the generator, negative sampling for D').

        L_GEN  = 1/|M| sum_{i in M} -log q(x_i | x_masked)
        L_DISC = 1/n sum_t -log D'_t where token t was replaced by another one, -log(1 - D'_t) elsewhere;  D' = sigmoid(E)

    over the masked positions M and the n real tokens of a batch. Labels, signs and the constant that puts the detection sum
    on the scale of masked positions are those of ``AmosCriterion``. Shapes: B sequences, T tokens, M masked positions.

    The variants change one of the two terms:

        L_GEN  = 0 for a frozen generator, and for one without context (5.3.2, 5.3.3)
        L_GEN  = 1/|M| sum_{i in M} -(R_i - b_i) log q(sample_i) + BCE(sigmoid(w h_i), exp(-R_i))                  (5.3.4)
                 with R_i = -log(1 - D'_i) if sample_i is the original, else -log D'_i, and b_i = -log sigmoid(w h_i)
        L_DISC = the mean over M, or over |M| random tokens (ELECTRA 15 %, 5.4.3)
        L_MAIN = 1/|M| sum_{i in M} -log p(x_i | x_replaced) instead of L_DISC (Replace MLM, 5.4.3), or
                 1/n sum_t -log(C_t [x_t = x_t^replaced] + (1 - C_t) p(x_t | x_replaced)) over all tokens that are not
                 special (All-Tokens MLM), C the probability of copying; its weight is ``--main-loss-weight``

    Departures: a sampled token that equals the original counts as original, as in ELECTRA's released code; Algorithm 2 of
    the thesis labels it as noise. 5.3.4 writes D for the probability of "original", which is 1 - D' here; it gives no
    weight for the baseline's loss, which trains no other parameter. The divisor of All-Tokens MLM counts special tokens
    too, so its weight is slightly smaller. With shared embeddings the reward also trains the token embeddings: they are
    the generator's output layer.
    """

    COUNTED_BY = {
        "policy_loss": "sample_size",
        "baseline_loss": "sample_size",
        "reward": "sample_size",
        "main_loss": "_predicted",
        "main_acc": "_predicted",
        "copy_prob": "_predicted",
        "replaced": "sample_size",  # without detection, which logs it otherwise
    }

    def __init__(
        self,
        task,
        discriminator_loss_weight: float,
        detection_positions: str = "all",
        main_loss_weight: float = 1.0,
        encoder_mlm_weight: float = 0.0,
    ):
        super().__init__(task)
        self.discriminator_loss_weight = discriminator_loss_weight
        self.detection_positions = detection_positions
        self.main_loss_weight = main_loss_weight
        self.encoder_mlm_weight = encoder_mlm_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        batch = PretrainingBatch.of(sample)
        output = model(batch)
        (depth,) = model.depth_names
        generator_loss, generator_log = self.generator_loss(output, batch, depth)
        main_loss, main_log = self.main_loss(output, batch)
        loss = generator_loss + main_loss
        logging_output = {
            "loss": loss.detach(),
            **batch_counts(sample),
            **temperature_sum(output.generator_temperature, sample),
            **generator_log,
            **main_log,
        }
        return loss, sample["num_masked"], logging_output

    def generator_loss(
        self, output: ElectraOutput, batch: PretrainingBatch, depth: str
    ) -> tuple[Tensor | float, dict[str, Any]]:
        """Compute |M| L_GEN and its sums to log; ``depth`` is the suffix of the log keys."""
        if output.mlm_nll is None:
            return 0.0, {}
        is_masked = batch.masked_weights.float()  # [B,M]
        mlm_loss = (output.mlm_nll * is_masked).sum()
        log = {f"mlm_loss_{depth}": mlm_loss.detach(), f"mlm_acc_{depth}": (output.mlm_correct * is_masked).sum()}
        if output.learns_by_likelihood:
            return mlm_loss, log
        if output.sampled_log_probs is None:
            return 0.0, log
        rewards = self.rewards(output, batch)  # [B,M]
        policy_loss = (policy_losses(output.sampled_log_probs, rewards, output.baseline_logits) * is_masked).sum()
        baseline_loss = (baseline_losses(output.baseline_logits, rewards) * is_masked).sum()
        log |= {"policy_loss": policy_loss.detach(), "baseline_loss": baseline_loss.detach()}
        return policy_loss + baseline_loss, log | {"reward": (rewards * is_masked).sum()}

    @staticmethod
    def rewards(output: ElectraOutput, batch: PretrainingBatch) -> Tensor:
        """Compute R, the detection loss at each masked position, which the generator maximizes: [B,M] float32."""
        positions = batch.masked_positions
        logits, replaced = output.rtd_logits.detach().gather(1, positions), output.replaced.gather(1, positions)
        return detection_losses(logits, replaced)

    def main_loss(self, output: ElectraOutput, batch: PretrainingBatch) -> tuple[Tensor, dict[str, Any]]:
        """Compute |M| lambda L_DISC, or the weighted |M| L_MAIN, and its sums to log."""
        if output.rtd_logits is None:
            return self.prediction_loss(output, batch)
        is_real = batch.tokens.ne(self.padding_idx)  # [B,T]
        is_scored = self.choose_positions(batch, is_real)
        rtd_loss, log = detection_terms(output, output.replaced, is_scored, is_real, self.training)
        log["_changed"] = (output.replaced & is_real).sum()
        # A sum over as many tokens as are masked is already on the scale of sums over masked positions.
        share = self.task.masked_share if self.detection_positions == "all" else 1.0
        loss = self.discriminator_loss_weight * share * rtd_loss
        if output.predictions is not None:
            main_loss, sums = encoder_mlm_terms(output.predictions)
            loss = loss + self.encoder_mlm_weight * main_loss
            log |= sums
        return loss, log

    def choose_positions(self, batch: PretrainingBatch, is_real: Tensor) -> Tensor:
        """Return the tokens that the detection loss averages over: [B,T] bool, all or as many per sequence as are masked."""
        if self.detection_positions == "all":
            return is_real
        positions, weights = batch.masked_positions, batch.masked_weights
        if self.detection_positions == "masked":
            return mark_positions(positions, weights, is_real.size(1))
        return random_positions(is_real, weights.sum(1))

    def prediction_loss(self, output: ElectraOutput, batch: PretrainingBatch) -> tuple[Tensor, dict[str, Any]]:
        if self.detection_positions != "all":
            raise UserError(f"--detection-positions {self.detection_positions} needs --main-objective detection")
        predictions = output.predictions
        main_loss, log = encoder_mlm_terms(predictions)
        log["replaced"] = (output.replaced & batch.tokens.ne(self.padding_idx)).sum()
        if predictions.copy_probs is None:  # a sum over masked positions, whose number is sample_size
            return self.main_loss_weight * main_loss, log
        log["copy_prob"] = (predictions.copy_probs * predictions.weights).sum()
        return self.main_loss_weight * self.task.masked_share * main_loss, log
