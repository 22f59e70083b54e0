"""Our heads with Hugging Face's weights: MPNet's question answering, and the module of its XLNet."""

import itertools

import pytest
import torch

from amos_fairseq.downstream.spans.task import IndependentSpanHead, JointSpanHead

B, T, D = 2, 11, 16
transformers = pytest.importorskip("transformers")
# float32 through one or two layers of width 16, summed in another order.
TOLERANCE = 1e-5


@pytest.fixture
def states():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(5))


def test_independent_head_is_qa_outputs(states):
    sizes = {"vocab_size": 30, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    theirs = transformers.MPNetForQuestionAnswering(transformers.MPNetConfig(hidden_size=D, **sizes)).qa_outputs
    ours = IndependentSpanHead(D)
    ours.output.load_state_dict(theirs.state_dict())
    mask = torch.ones(B, T, dtype=torch.bool)
    zeros = torch.zeros(B, dtype=torch.long)
    output = ours(states, mask, (zeros, zeros))
    start, end = theirs(states).split(1, dim=-1)
    assert torch.allclose(output.start_logits, start.squeeze(-1), atol=TOLERANCE)
    assert torch.allclose(output.end_logits, end.squeeze(-1), atol=TOLERANCE)


@pytest.fixture
def xlnet():
    from transformers.models.xlnet import modeling_xlnet

    config = transformers.XLNetConfig(d_model=D, n_head=2, layer_norm_eps=1e-5)
    torch.manual_seed(3)
    parts = ("StartLogits", "EndLogits", "AnswerClass")
    return [getattr(modeling_xlnet, f"XLNetPooler{name}")(config).eval() for name in parts]


def joint_head_of(xlnet) -> JointSpanHead:
    start, end, answer_class = xlnet
    head = JointSpanHead(D, dropout=0.1, layer_norm_eps=1e-5).eval()
    theirs = {"start": start.dense, "end_dense": end.dense_0, "end_norm": end.LayerNorm, "end": end.dense_1}
    theirs |= {"answerable_dense": answer_class.dense_0, "answerable": answer_class.dense_1}
    for name, module in theirs.items():
        getattr(head, name).load_state_dict(module.state_dict())
    return head


def test_joint_head_in_training_is_xlnets(xlnet, states):
    """Logits of start and end given the true start; masked positions are compared as not chosen."""
    head, (start, end, _) = joint_head_of(xlnet), xlnet
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[0, 3:9] = mask[1, 3:6] = True
    p_mask = 1.0 - mask.float()
    p_mask[:, 0] = 0
    targets = torch.tensor([4, 0]), torch.tensor([7, 0])
    output = head(states, mask, targets)
    theirs = start(states, p_mask=p_mask), end(states, start_positions=targets[0], p_mask=p_mask)
    for our_logits, their_logits in zip((output.start_logits, output.end_logits), theirs, strict=True):
        assert torch.equal(our_logits.isfinite(), p_mask == 0)
        assert torch.allclose(our_logits[p_mask == 0], their_logits[p_mask == 0], atol=TOLERANCE)


def test_joint_head_at_inference_is_xlnets_beam(xlnet, states):
    """Hugging Face's own steps of the beam, with probabilities where ours has their logarithms."""
    head, (start, end, answer_class) = joint_head_of(xlnet), xlnet
    mask = torch.ones(B, T, dtype=torch.bool)
    start_p = start(states).softmax(-1)
    top_p, top = start_p.topk(5, dim=-1)
    top_states = states.gather(1, top.unsqueeze(-1).expand(-1, -1, D))
    pairs = states.unsqueeze(2).expand(-1, -1, 5, -1)
    end_p = end(pairs, start_states=top_states.unsqueeze(1).expand_as(pairs)).softmax(1)  # [B,T,5]
    end_top_p, end_top = end_p.topk(5, dim=1)  # [B,5 ends,5 starts]
    candidates = head(states, mask)
    for window in range(B):
        expected = {}
        for s, e in itertools.product(range(5), repeat=2):
            pair = int(top[window, s]), int(end_top[window, e, s])
            if 0 not in pair:
                expected[pair] = float(top_p[window, s].log() + end_top_p[window, e, s].log())
        rows = zip(*(part[window].tolist() for part in candidates[:3]), strict=True)
        assert {(a, b): score for a, b, score in rows if score > -1e30} == pytest.approx(expected, abs=TOLERANCE)
    expected_start = torch.einsum("bt,btd->bd", start_p, states)
    nulls = answer_class(states, start_states=expected_start, cls_index=torch.zeros(B, dtype=torch.long))
    assert torch.allclose(candidates.null_scores, nulls, atol=TOLERANCE)
