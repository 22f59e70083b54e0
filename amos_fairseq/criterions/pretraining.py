"""The base class of the pretraining criterions: logging outputs that are sums, and the log keys computed from them."""

from collections.abc import Mapping
from typing import Any

from fairseq import metrics
from fairseq.criterions import FairseqCriterion

from amos_fairseq.criterions.detection import log_detection

PER_MASKED_POSITION = ("mlm_", "mixture_", "generator_temperature")


class PretrainingCriterion(FairseqCriterion):
    """A criterion whose logging outputs are sums over a batch, which add up over ranks and accumulated batches.

    ``COUNTED_BY`` names, for a term that is not a mean over masked positions, the sum that it is divided by.
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
    return {
        "ntokens": sample["ntokens"],
        "nsentences": sample["nsentences"],
        "sample_size": sample["num_masked"],
    }


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
