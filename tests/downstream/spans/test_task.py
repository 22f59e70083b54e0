"""The task ``squad``: its batches over ranks and epochs, errors, its loss by hand, and its heads against Hugging Face's."""

import math
from types import SimpleNamespace

import pytest
import torch
from fine_tuning_tasks import build_amos, set_up
from small_models import logged, nll
from synthetic_squad import make_squad, prepare_squad
from torch import tensor
from torch.nn.functional import linear

from amos_fairseq.downstream.spans.task import IndependentSpanHead, JointSpanHead, SpanOutput, SquadCriterion, SquadTask
from amos_fairseq.errors import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_squad(tmp_path_factory.mktemp("squad"), make_squad())


def make_task(data, **settings) -> SquadTask:
    return set_up("squad", data, tokens_per_window=64, doc_stride=16, max_question_length=32, **settings)


@pytest.mark.parametrize(("kind", "head"), [("independent", IndependentSpanHead), ("joint", JointSpanHead)])
def test_head_is_built_and_restored_from_a_checkpoint(data, kind, head):
    other_kind = "joint" if kind == "independent" else "independent"
    model, other = (build_amos(make_task(data, span_head=one)) for one in (kind, other_kind))
    assert isinstance(model.span_head, head)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other.register_heads_of(state)
    assert isinstance(other.span_head, head)
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    # Of a checkpoint with a head of other shapes only the encoder is taken.
    third = build_amos(make_task(data, span_head=other_kind))
    fresh = [parameter.clone() for parameter in third.span_head.parameters()]
    third.load_state_dict({name: value + 1 for name, value in state.items()}, strict=True)
    assert all(map(torch.equal, third.span_head.parameters(), fresh))
    assert torch.equal(third.encoder.embed_positions.weight, model.encoder.embed_positions.weight + 1)


def test_a_second_separator(data):
    with pytest.raises(UserError, match="--separator-token 7 is not </s>: give 2"):
        make_task(data, separator_token=7)
    task = make_task(data, separator_token=2)
    task.load_dataset("valid")
    assert task.datasets["valid"][0]["tokens"].tolist().count(2) == 3
    with pytest.raises(UserError, match=r"--max-positions 32 has no room .* --tokens-per-window 64"):
        task.get_batch_iterator(task.datasets["valid"], max_sentences=4, max_positions=32)


NO = float("-inf")
# Three windows of four tokens; the second has no answer. Question tokens (position 1) cannot be chosen.
OUTPUT = SpanOutput(
    start_logits=tensor([[0.0, NO, 2.0, 1.0], [1.0, NO, 0.0, 0.0], [0.0, NO, 3.0, 0.0]]),
    end_logits=tensor([[0.0, NO, 0.0, 1.0], [0.0, NO, 1.0, 0.0], [0.0, NO, 5.0, 0.0]]),
    unanswerable_logits=tensor([-1.0, 2.0, 0.5]),
)
TRUE_SPANS = (tensor([2, 0, 2]), tensor([3, 0, 2]))


def loss_of(output: SpanOutput):
    sample = {"net_input": {"span_targets": TRUE_SPANS}, "nsentences": 3, "ntokens": 12}
    return SquadCriterion(SimpleNamespace())(lambda **net_input: output, sample)


SPAN_LOSS = (
    (nll([0, 2, 1], 1) + nll([0, 0, 1], 2)) / 2
    + (nll([1, 0, 0], 0) + nll([0, 1, 0], 0)) / 2
    + (nll([0, 3, 0], 1) + nll([0, 5, 0], 1)) / 2
)
ANSWERABLE_LOSS = math.log1p(math.exp(-1)) + math.log1p(math.exp(-2)) + math.log1p(math.exp(0.5))


def test_loss_by_hand():
    """Of both heads; the independent one has no classifier."""
    loss, sample_size, log = loss_of(OUTPUT)
    assert float(loss) == pytest.approx(SPAN_LOSS + 0.5 * ANSWERABLE_LOSS, rel=1e-6)
    assert sample_size == 3
    assert type(sample_size) is int
    assert float(log["span_loss"]) == pytest.approx(SPAN_LOSS, rel=1e-6)
    assert float(log["answerable_loss"]) == pytest.approx(ANSWERABLE_LOSS, rel=1e-6)
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
