"""Detection of replaced tokens: the loss, sums over a batch, and the rates in the log. The positive class is "replaced"."""

from dataclasses import dataclass, field
from typing import Any

from fairseq import metrics
from fairseq.dataclass import FairseqDataclass
from fairseq.logging.meters import MetersDict
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from amos_fairseq.functional.replaced_token_detection import auc_from_histograms, logit_histogram


@dataclass
class DetectionLossConfig(FairseqDataclass):
    """For objectives with a generator and a detection loss (50: AMOS, Appendix B)."""

    discriminator_loss_weight: float = field(
        default=50.0, metadata={"range": "0 or more", "help": "lambda, the weight of the detection loss"}
    )


def detection_losses(logits: Tensor, replaced: Tensor) -> Tensor:
    """Compute the elementwise loss in nats from float logits, positive for "replaced", and bool labels of the same shape.

    -[x_i^rep = x_i] log(1 - r_i) - [x_i^rep != x_i] log r_i with r_i = sigmoid(logit_i)
    (AMOS Eq. 1, TEAMS Eq. 4, thesis section 5.1.5)
    """
    return binary_cross_entropy_with_logits(logits, replaced.float(), reduction="none")


def detection_loss(logits: Tensor, replaced: Tensor, is_real: Tensor) -> Tensor:
    """Sum :func:`detection_losses` over the real tokens; arguments as in :func:`detection_sums`."""
    return (detection_losses(logits, replaced) * is_real).sum()


def detection_sums(logits: Tensor, replaced: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """Compute sums over the real tokens of a batch, which add up over batches and ranks.

    Args:
        logits: [B,T] float, positive for "replaced".
        replaced: [B,T] bool.
        is_real: [B,T] bool, False at padding and at every other token that is not scored.
    """
    predicted_positive = (logits > 0) & is_real
    replaced = replaced & is_real
    return {
        "_scored": is_real.sum(),
        "_predicted_positive": predicted_positive.sum(),
        "_replaced": replaced.sum(),
        "_true_positives": (predicted_positive & replaced).sum(),
        "_replaced_logits": logit_histogram(logits, replaced),
        "_original_logits": logit_histogram(logits, is_real & ~replaced),
    }


def log_detection(totals: dict[str, Any], num_masked: float) -> None:
    """Log ``replaced``, ``rtd_acc``, ``rtd_recall``, ``rtd_precision`` and ``rtd_auc`` from summed ``totals``.

    The sums are logged under names that fairseq hides, so rates over many updates are rates of sums. If the label is not
    "differs from the original", ``_changed`` counts the tokens that differ.
    """
    for key in ("_scored", "_predicted_positive", "_replaced", "_true_positives"):
        metrics.log_scalar_sum(key, float(totals[key]))
    metrics.log_scalar_sum("_changed", float(totals.get("_changed", totals["_replaced"])))
    metrics.log_scalar_sum("_masked", num_masked)
    for key in ("_replaced_logits", "_original_logits"):
        metrics.log_scalar_sum(key, totals[key].cpu())

    metrics.log_derived("replaced", lambda meters: ratio(meters, "_changed", "_masked"))
    metrics.log_derived("rtd_acc", accuracy)
    metrics.log_derived("rtd_recall", lambda meters: ratio(meters, "_true_positives", "_replaced"))
    metrics.log_derived("rtd_precision", lambda meters: ratio(meters, "_true_positives", "_predicted_positive"))
    metrics.log_derived("rtd_auc", area_under_curve)


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
