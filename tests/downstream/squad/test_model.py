"""Span heads against values in float64, and positions that may never be chosen."""

import pytest
import torch
from torch.nn.functional import linear

from amos_fairseq.downstream.squad.task import IndependentSpanHead, JointSpanHead

B, T, D = 3, 9, 8
# Question at 1-2, context from 4 on; the second window is padded, the third has a context of one token.
MASK = torch.zeros(B, T, dtype=torch.bool)
MASK[0, 4:8] = MASK[1, 4:6] = MASK[2, 4:5] = True
TARGETS = (torch.tensor([5, 0, 4]), torch.tensor([6, 0, 4]))


@pytest.fixture
def states():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(2))


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    head = IndependentSpanHead(D) if kind == "independent" else JointSpanHead(D, dropout=0.0, layer_norm_eps=1e-5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


def allowed(window: int) -> set[int]:
    return {0, *MASK[window].nonzero().flatten().tolist()}


@pytest.mark.parametrize("kind", ["independent", "joint"])
def test_only_context_and_the_null_position_can_be_chosen(kind, states):
    """In training: the softmax gives nothing to question, separators and padding, for any states."""
    head = make(kind)
    output = head(states, MASK, TARGETS)
    for window in range(B):
        for logits in (output.start_logits, output.end_logits):
            assert set(logits[window].isfinite().nonzero().flatten().tolist()) == allowed(window)
    other = states.clone()
    other[:, 1:4] += 10
    other[:, 8] -= 10
    changed = head(other, MASK, TARGETS)
    assert torch.equal(changed.start_logits, output.start_logits)
    assert torch.equal(changed.end_logits, output.end_logits)


def test_independent_candidates_are_all_pairs(states):
    """With a beam that holds every token: each pair's sum, and the null score, in float64."""
    head = make("independent")
    candidates = head(states, MASK)
    logits = linear(states.double(), head.output.weight.double(), head.output.bias.double()).detach()
    for window in range(B):
        rows = zip(*(part[window].tolist() for part in candidates[:3]), strict=True)
        found = {(start, end): score for start, end, score in rows if score > -1e30}
        context = allowed(window) - {0}
        assert set(found) == {(start, end) for start in context for end in context}
        for (start, end), score in found.items():
            # float32 sums of eight products against float64.
            assert score == pytest.approx(float(logits[window, start, 0] + logits[window, end, 1]), abs=1e-5)
        expected = float(logits[window, 0].sum())
        assert candidates.null_scores[window].item() == pytest.approx(expected, abs=1e-5)


def test_independent_beam_contains_the_best(states):
    head = IndependentSpanHead(D, beam=2)
    full = IndependentSpanHead(D, beam=9)
    full.load_state_dict(head.state_dict())
    few, all_pairs = head(states, MASK), full(states, MASK)
    assert few.scores.shape == (B, 4)
    assert torch.equal(few.scores.max(1).values, all_pairs.scores.max(1).values)


def test_joint_classifier_does_not_see_the_label(states):
    """Given the true start, it would know in training whether the start is <s>."""
    head = make("joint")
    starts = torch.zeros(3).long(), TARGETS[0]
    logits = [head(states, MASK, (start, start)).unanswerable_logits for start in starts]
    assert torch.equal(*logits)
    assert torch.equal(logits[0], head(states, MASK).null_scores)


@pytest.mark.parametrize("kind", ["independent", "joint"])
def test_every_weight_receives_a_finite_gradient(kind, states):
    """No parameter is left unused, which distributed training refuses, and -inf of masked positions makes no NaN."""
    head = make(kind)
    output = head(states, MASK, TARGETS)
    loss = torch.nn.functional.cross_entropy(torch.cat([output.start_logits, output.end_logits]), torch.cat(TARGETS))
    if isinstance(head, JointSpanHead):
        loss = loss + output.unanswerable_logits.sum()
    loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.isfinite().all(), name
        if name not in ("start.bias", "end.bias", "output.bias"):  # a softmax does not depend on a constant
            assert parameter.grad.abs().sum() > 0, name
