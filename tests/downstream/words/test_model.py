"""The scores of edges against the equation of the thesis, in a float64 loop."""

import numpy as np
import torch

from amos_fairseq.downstream.words.model import ParsingHead


def test_scores_are_those_of_the_equation():
    """s = ReLU(W_head z1 + b) (W_r + W) ReLU(W_dep z2 + b) of section 4.2.3, the root first; two sentences of 3 and 2 words."""
    torch.manual_seed(1)
    head = ParsingHead(width=5, num_relations=2, dropout=0.5).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    states, is_padding = torch.randn(2, 3, 5), torch.tensor([[False] * 3, [False, False, True]])
    found = head(states, is_padding).detach().numpy()
    weights = {name: value.detach().double().numpy() for name, value in head.named_parameters()}
    shared = weights["shared.weight"].T  # a linear layer computes x W^T
    relations = [weights["relations.weight"][r * 128 : (r + 1) * 128].T for r in range(2)]
    for sentence, size in ((0, 3), (1, 2)):
        words = [weights["root.weight"][0], *states[sentence].double().numpy()]
        hidden = {}
        for name in ("head", "dependent"):
            hidden[name] = [np.maximum(0, weights[f"{name}.weight"] @ w + weights[f"{name}.bias"]) for w in words]
        for word in range(1, size + 1):
            for candidate in range(4):
                for relation in range(2):
                    value = found[sentence, word - 1, candidate, relation]
                    if candidate in (word, *range(size + 1, 4)):
                        assert value == -np.inf
                    else:
                        matrix = relations[relation] + shared
                        expected = hidden["head"][candidate] @ matrix @ hidden["dependent"][word]
                        np.testing.assert_allclose(value, expected, rtol=1e-4)  # float32


def test_padded_slots_have_no_gradient_that_is_not_finite():
    head = ParsingHead(width=5, num_relations=3, dropout=0.0)
    states = torch.randn(1, 4, 5, requires_grad=True)
    scores = head(states, torch.tensor([[False, False, True, True]]))
    targets = torch.tensor([0, 3, -100, -100])
    torch.nn.functional.cross_entropy(scores.flatten(2).flatten(0, 1), targets, reduction="sum").backward()
    assert torch.isfinite(states.grad).all()
    assert states.grad[0, 2:].abs().max() == 0
    assert all(torch.isfinite(parameter.grad).all() for parameter in head.parameters())
