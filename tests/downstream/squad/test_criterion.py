"""The objective of answer spans and its logged values by hand."""

import math
from types import SimpleNamespace

import pytest
from small_models import logged
from torch import tensor

from amos_fairseq.downstream.squad.task import SpanOutput, SquadCriterion

NO = float("-inf")
# Three windows of four tokens; the second has no answer. Question tokens (position 1) cannot be chosen.
OUTPUT = SpanOutput(
    start_logits=tensor([[0.0, NO, 2.0, 1.0], [1.0, NO, 0.0, 0.0], [0.0, NO, 3.0, 0.0]]),
    end_logits=tensor([[0.0, NO, 0.0, 1.0], [0.0, NO, 1.0, 0.0], [0.0, NO, 5.0, 0.0]]),
    unanswerable_logits=tensor([-1.0, 2.0, 0.5]),
)
TARGETS = (tensor([2, 0, 2]), tensor([3, 0, 2]))


def loss_of(output: SpanOutput, weight: float = 0.5):
    sample = {"net_input": {"span_targets": TARGETS}, "nsentences": 3, "ntokens": 12}
    return SquadCriterion(SimpleNamespace(), weight)(lambda **net_input: output, sample)


def nll(logits: list[float], place: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[place]


SPAN_LOSS = (
    (nll([0, 2, 1], 1) + nll([0, 0, 1], 2)) / 2
    + (nll([1, 0, 0], 0) + nll([0, 1, 0], 0)) / 2
    + (nll([0, 3, 0], 1) + nll([0, 5, 0], 1)) / 2
)
ANSWERABLE_LOSS = math.log1p(math.exp(-1)) + math.log1p(math.exp(-2)) + math.log1p(math.exp(0.5))


def test_loss_by_hand():
    loss, sample_size, log = loss_of(OUTPUT)
    assert float(loss) == pytest.approx(SPAN_LOSS + 0.5 * ANSWERABLE_LOSS, rel=1e-6)
    assert sample_size == 3
    assert type(sample_size) is int
    assert float(log["span_loss"]) == pytest.approx(SPAN_LOSS, rel=1e-6)
    assert float(log["answerable_loss"]) == pytest.approx(ANSWERABLE_LOSS, rel=1e-6)
    assert float(loss_of(OUTPUT, 2.0)[0]) == pytest.approx(SPAN_LOSS + 2 * ANSWERABLE_LOSS, rel=1e-6)


def test_a_head_without_classifier_has_no_such_term():
    loss, _, log = loss_of(OUTPUT._replace(unanswerable_logits=None))
    assert float(loss) == pytest.approx(SPAN_LOSS, rel=1e-6)
    assert not {"answerable_loss", "answerable_acc"} & log.keys()


def test_means_over_batches_and_ranks():
    """Two logs of three windows each: every rate is a mean over six; right by hand are starts 3, ends 2, classes 2."""
    values = logged(SquadCriterion, loss_of(OUTPUT)[2], loss_of(OUTPUT)[2])
    assert values["start_acc"] == 1.0
    assert values["end_acc"] == values["span_acc"] == values["answerable_acc"] == pytest.approx(2 / 3, abs=1e-4)
    assert values["loss"] == pytest.approx((SPAN_LOSS + 0.5 * ANSWERABLE_LOSS) / 3, abs=1e-4)
    assert values["span_loss"] == pytest.approx(SPAN_LOSS / 3, abs=1e-4)
    assert all(type(value) is float for value in values.values())
