"""Layers that are recomputed in the backward pass: the same bits, less memory."""

import pytest
import torch
from small_models import encoder_config, model_and_criterion, small_batch
from torch import Tensor, nn
from training_step import LiveBytes

from amos_fairseq.modules.bert_encoder import BertEncoder, BertLayer

DROPOUTS = {"dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3}
OBJECTIVES = ["amos", "amos reference", "electra", "electric", "two_tower", "teams"]


def count_calls(model: nn.Module) -> list[nn.Module]:
    """A list that grows by the layer whenever one is called."""
    calls: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, BertLayer):
            module.register_forward_pre_hook(lambda layer, inputs: calls.append(layer))
    return calls


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_and_gradients_are_the_same_bits(objective: str) -> None:
    """With dropout everywhere, in all encoders, and in the layers beside an encoder (TEAMS)."""
    results, num_calls = [], []
    for recomputes in (False, True):
        settings = DROPOUTS | ({"kernels": "reference"} if objective == "amos reference" else {})
        model, criterion = model_and_criterion(objective.split()[0], activation_checkpointing=recomputes, **settings)
        calls = count_calls(model)
        torch.manual_seed(1)
        loss, _, _ = criterion(model, small_batch())
        forward_calls = len(calls)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        results[-1].append(torch.rand(3))  # and the random numbers that come next
        num_calls.append((forward_calls, len(calls)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    (forward, kept), (again, recomputed) = num_calls
    assert forward == kept == again
    assert recomputed == 2 * forward


B, T, D, HEADS = 4, 32, 32, 2


def bytes_of_a_step(num_layers: int, recomputes: bool) -> tuple[int, int]:
    """Kept between forward and backward pass, and the most at any moment, gradients included."""
    sizes = {"num_layers": num_layers, "width": D, "ffn_width": 4 * D, "num_heads": HEADS, "max_positions": T}
    settings = {"dropout": 0.1, "attention_dropout": 0.1, "activation_checkpointing": recomputes}
    module, embeddings = BertEncoder(encoder_config(**sizes, **settings)).train(), torch.randn(B, T, D)
    with LiveBytes() as live:
        loss: Tensor = module(embeddings)[-1].sum()
        kept = live.now
        loss.backward()
    return kept, live.peak


def test_only_the_input_of_a_layer_is_saved() -> None:
    """D numbers a token. Layers that keep all have 16 D numbers and 2 D bytes, one for each mask of dropout: their input 1,
    query, key and value 3, mixed values 1, input and output of the first LayerNorm 2, the widened states before and after
    gelu 8, the input of the second LayerNorm 1. In 16 bit that is 34 D bytes. A CPU keeps also the weights of attention,
    their mask, and mean and deviation of both LayerNorms.
    """
    one_more = bytes_of_a_step(7, True)[0] - bytes_of_a_step(6, True)[0]
    assert one_more == 4 * B * T * D
    plain = bytes_of_a_step(7, False)[0] - bytes_of_a_step(6, False)[0]
    assert plain == B * T * (16 * 4 * D + 2 * D + HEADS * T * (4 + 1) + 2 * 2 * 4)
