"""Reading and writing masked positions through index tensors, against loops over sequences and slots."""

import pytest
import torch

from amos_fairseq.functional.positions import add_at_positions, gather_positions, replace_positions

# Two sequences, three slots; the second sequence has one masked position and two padded slots.
POSITIONS = torch.tensor([[1, 2, 5], [4, 0, 0]])
WEIGHTS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
SLOTS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_gather_positions(states):
    gathered = gather_positions(states, POSITIONS)
    assert gathered.shape == (2, 3, 3)
    for b, m in SLOTS:
        assert torch.equal(gathered[b, m], states[b, POSITIONS[b, m]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool])
def test_replace_changes_masked_positions_and_no_padded_slot(dtype):
    tokens, values = torch.arange(12).view(2, 6), torch.full((2, 3), 99)
    replaced = replace_positions(tokens, POSITIONS, values, WEIGHTS.to(dtype))
    assert replaced.tolist() == [[0, 99, 99, 3, 4, 99], [6, 7, 8, 9, 99, 11]]
    assert torch.equal(tokens, torch.arange(12).view(2, 6))


def test_add_values_and_their_gradients(states):
    values = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.tensor([[1.0, 0.5, 1.0], [1.0, 0.0, 0.0]])
    total = add_at_positions(states, POSITIONS, values, weights)
    expected = states.detach().clone()
    for b, m in SLOTS:
        expected[b, POSITIONS[b, m]] += weights[b, m] * values[b, m].detach()
    assert torch.allclose(total, expected, atol=1e-6)

    upstream = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2))
    total.backward(upstream)
    assert torch.equal(states.grad, upstream)
    for b, m in SLOTS:
        assert torch.allclose(values.grad[b, m], weights[b, m] * upstream[b, POSITIONS[b, m]])
