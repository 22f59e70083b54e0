"""What the pretraining criterions share: logging outputs that are sums, the log keys computed from them, and the detection of
replaced tokens, whose positive class is "replaced"."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq import metrics
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging.meters import MetersDict
from omegaconf import II
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from amos_fairseq.functional.replaced_token_detection import (
    StateSpread,
    auc_from_histograms,
    logit_histograms,
    state_spread,
    state_sums,
)
from amos_fairseq.models.pretraining import PretrainingOutput
from amos_fairseq.modules.heads import TokenPredictions
from amos_fairseq.setting_checks import setting

SUMMED = ("_scored", "_predicted_positive", "_replaced", "_true_positives", "_squared_deviations")
SUMMED_HISTOGRAMS = ("_replaced_logits", "_original_logits")


@dataclass
class DetectionLossConfig(FairseqDataclass):
    """For objectives with a generator and a detection loss (50: AMOS, Appendix B)."""

    discriminator_loss_weight: float = setting(50.0, "lambda, the weight of the detection loss", "0 or more")


@dataclass
class DetectionWithMlmLossConfig(DetectionLossConfig):
    """Also the weight of the main network's prediction of the originals: a setting of the model, which has the head for it."""

    encoder_mlm_weight: float = II("model.encoder_mlm_weight")


def encoder_mlm_terms(predictions: TokenPredictions) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the loss (nats) of the main network's predictions of original tokens; return the sum, and what is logged."""
    loss, correct = ((part * predictions.weights).sum() for part in (predictions.nll, predictions.correct))
    return loss, {"main_loss": loss.detach(), "main_acc": correct, "_predicted": predictions.weights.sum()}


def detection_losses(logits: Tensor, replaced: Tensor) -> Tensor:
    """Compute the elementwise loss in nats from float logits, positive for "replaced", and bool labels of the same shape.

    -[x_i^rep = x_i] log(1 - r_i) - [x_i^rep != x_i] log r_i with r_i = sigmoid(logit_i)
    (AMOS Eq. 1, TEAMS Eq. 4, thesis section 5.1.5)
    """
    return binary_cross_entropy_with_logits(logits, replaced.float(), reduction="none")


def detection_terms(
    output: PretrainingOutput, labels: Tensor, is_scored: Tensor, is_real: Tensor, training: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum :func:`detection_losses` over the scored tokens; return the sum, and what :func:`log_detection` needs.

    Args:
        labels: [B,T] bool, True where the logits should be positive.
        is_scored: [B,T] bool, the tokens of the loss.
        is_real: [B,T] bool, the tokens whose states :func:`spread_sums` compares; in validation alone.
    """
    loss = (detection_losses(output.rtd_logits, labels) * is_scored).sum()
    sums = {"rtd_loss": loss.detach(), **detection_sums(output.rtd_logits.detach(), labels, is_scored)}
    return loss, sums if training else sums | spread_sums(output.rtd_states, is_real)


def detection_sums(logits: Tensor, replaced: Tensor, is_scored: Tensor) -> dict[str, Tensor]:
    """Compute sums over the scored tokens of a batch, which add up over batches and ranks; :func:`detection_counts` reads them.

    Everything that can be counted is in one histogram, because the host launches each operator here in every update.

    Args:
        logits: [B,T] float, positive for "replaced".
        replaced: [B,T] bool.
        is_scored: [B,T] bool, False at padding and at every other token that is not scored.
    """
    mean = (logits.double() * is_scored).sum() / is_scored.sum().clamp(min=1)
    return {
        "_logits": logit_histograms(logits, replaced + 2 * (logits > 0), 4, is_scored),
        "_squared_deviations": ((logits - mean).square() * is_scored).sum(),
    }


def detection_counts(histograms: Tensor) -> dict[str, Any]:
    """Return the counts of :data:`SUMMED` and the histograms of :data:`SUMMED_HISTOGRAMS` from ``_logits`` [4,400], whose rows
    are original and replaced tokens with a logit up to 0, then those with one above 0.
    """
    counts = histograms.sum(1).tolist()
    return {
        "_scored": sum(counts),
        "_predicted_positive": counts[2] + counts[3],
        "_replaced": counts[1] + counts[3],
        "_true_positives": counts[3],
        "_replaced_logits": histograms[1] + histograms[3],
        "_original_logits": histograms[0] + histograms[2],
    }


def spread_sums(states: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """Compute the sums from which :func:`log_spread` logs how far the states below the detection head differ.

    For validation: the outer products cost as much as a linear layer in float64.

    Args:
        states: [B,T,D].
        is_real: [B,T] bool.
    """
    total, products = state_sums(states, is_real)
    return {"_states": is_real.sum(), "_state_total": total, "_state_products": products}


def log_detection(totals: dict[str, Any], num_masked: float) -> None:
    """Log the detection loss, ``replaced``, ``rtd_acc``, ``rtd_recall``, ``rtd_precision``, ``rtd_auc`` and what shows whether
    the detector is alive (:func:`loss_above_prior`, :func:`logit_std`), from summed ``totals``.

    The sums are logged under names that fairseq hides, so rates over many updates are rates of sums. If the label is not
    "differs from the original", ``_changed`` counts the tokens that differ.
    """
    totals = totals | detection_counts(totals["_logits"].cpu())
    num_scored = totals["_scored"]
    metrics.log_scalar("rtd_loss", float(totals["rtd_loss"]) / num_scored if num_scored else 0.0, num_scored, round=4)
    for key in SUMMED:
        metrics.log_scalar_sum(key, float(totals[key]))
    metrics.log_scalar_sum("_changed", float(totals.get("_changed", totals["_replaced"])))
    metrics.log_scalar_sum("_masked", num_masked)
    for key in SUMMED_HISTOGRAMS:
        metrics.log_scalar_sum(key, totals[key])

    metrics.log_derived("replaced", lambda meters: ratio(meters, "_changed", "_masked"))
    metrics.log_derived("rtd_acc", accuracy)
    metrics.log_derived("rtd_recall", lambda meters: ratio(meters, "_true_positives", "_replaced"))
    metrics.log_derived("rtd_precision", lambda meters: ratio(meters, "_true_positives", "_predicted_positive"))
    metrics.log_derived("rtd_auc", area_under_curve)
    metrics.log_derived("rtd_loss_above_prior", loss_above_prior)
    metrics.log_derived("rtd_logit_std", logit_std)
    if "_states" in totals:
        log_spread(totals)


def log_spread(totals: dict[str, Any]) -> None:
    """Log ``rtd_state_variance``, ``rtd_first_component`` and ``rtd_participation_ratio`` of :func:`state_spread`."""
    metrics.log_scalar_sum("_states", float(totals["_states"]))
    for key in ("_state_total", "_state_products"):
        metrics.log_scalar_sum(key, totals[key].cpu())
    metrics.log_derived("rtd_state_variance", lambda meters: spread(meters).variance)
    metrics.log_derived("rtd_first_component", lambda meters: spread(meters).first_component)
    metrics.log_derived("rtd_participation_ratio", lambda meters: spread(meters).participation_ratio)


def spread(meters: MetersDict) -> StateSpread:
    """Return :func:`state_spread` of the summed states, to four digits."""
    exact = _spread_of_sums(meters["_states"].sum, meters["_state_total"].sum, meters["_state_products"].sum)
    return StateSpread(*(float(f"{value:.4g}") for value in exact))


# Three logged values have the same sums, and fairseq asks for them after each batch of a validation. A sum is a new tensor
# after each batch, and the cache compares tensors by identity.
_spread_of_sums = functools.lru_cache(maxsize=1)(state_spread)


def loss_above_prior(meters: MetersDict) -> float:
    """Return the detection loss minus the loss of a detector that knows only the fraction p of replaced tokens, in nats.

    That loss is the entropy -p log p - (1 - p) log(1 - p). Below 0: the detector distinguishes tokens.
    """
    scored, replaced = meters["_scored"].sum, meters["_replaced"].sum
    share = replaced / scored if scored else 0.0
    entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
    return round(meters["rtd_loss"].avg - entropy, 4)


def logit_std(meters: MetersDict) -> float:
    """Return the standard deviation of the logits around the mean of their batch.

    It leaves out how that mean moves from update to update, which would hide a detector that gives all tokens of a batch one
    probability.
    """
    count = meters["_scored"].sum
    return float(f"{math.sqrt(meters['_squared_deviations'].sum / count):.4g}") if count else 0.0


def ratio(meters: MetersDict, part: str, whole: str) -> float:
    """Return one sum divided by another; 0 if the divisor is 0 (no token predicted positive, or none replaced)."""
    return round(meters[part].sum / meters[whole].sum, 4) if meters[whole].sum else 0.0


def accuracy(meters: MetersDict) -> float:
    """Return the share of the scored tokens with a correct prediction: all but false negatives and false positives."""
    wrong = meters["_replaced"].sum + meters["_predicted_positive"].sum - 2 * meters["_true_positives"].sum
    return round(1 - wrong / meters["_scored"].sum, 4) if meters["_scored"].sum else 0.0


def area_under_curve(meters: MetersDict) -> float:
    """Return the AUC; nan while no token, or every token, is replaced."""
    return round(auc_from_histograms(meters["_replaced_logits"].sum, meters["_original_logits"].sum), 4)


PER_MASKED_POSITION = ("mlm_", "mixture_", "generator_temperature")


class PretrainingCriterion(FairseqCriterion):
    """A criterion whose logging outputs are sums over a batch, which add up over ranks and accumulated batches.

    ``forward`` returns the summed loss (float32 scalar), the number of masked positions, which divides it, and these sums.
    ``COUNTED_BY``: for each term that is not a mean over masked positions, the key of the sum that it is divided by.
    """

    COUNTED_BY: Mapping[str, str] = {}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        log_sums(logging_outputs, {key: by for key, by in cls.COUNTED_BY.items() if key in logging_outputs[0]})

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def batch_counts(sample: dict[str, Any]) -> dict[str, int]:
    """Return what fairseq needs in every logging output; ``sample_size`` is the number of masked positions."""
    return {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": sample["num_masked"]}


def temperature_sum(temperature: float | None, sample: dict[str, Any]) -> dict[str, float]:
    """Return the sum over masked positions of the sampling temperature, to log it; {} for None."""
    return {} if temperature is None else {"generator_temperature": temperature * sample["num_masked"]}


def log_sums(logging_outputs: list[dict[str, Any]], counted_by: Mapping[str, str]) -> None:
    """Log means over masked positions, the terms of ``counted_by``, and the loss and rates of the detection if there is one.

    The trainer passes Python numbers and CPU tensors (:mod:`amos_fairseq.compat.device_reads`).

    Args:
        logging_outputs: sums over a batch, one dictionary per rank and accumulated batch, all with the same keys.
        counted_by: see :class:`PretrainingCriterion`.
    """
    totals = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
    num_masked = float(totals["sample_size"])
    metrics.log_scalar("loss", mean(totals["loss"], num_masked), num_masked, round=3)
    for key in totals:
        if key.startswith(PER_MASKED_POSITION) and key not in counted_by:
            metrics.log_scalar(key, mean(totals[key], num_masked), num_masked, round=4)
    for key, counter in counted_by.items():
        count = float(totals[counter])
        metrics.log_scalar(key, mean(totals[key], count), count, round=4)
    if "rtd_loss" in totals:
        log_detection(totals, num_masked)


def mean(total: Any, count: float) -> float:
    """Return total / count as a Python float, 0 for an empty batch. A checkpoint must not hold numpy or tensor scalars."""
    return float(total) / count if count else 0.0
