"""Compiled and recomputed layers on a CUDA device."""

import pytest
import torch
from small_models import encoder_config
from torch import Tensor

from amos_fairseq.modules.bert_encoder import BertEncoder
from amos_fairseq.modules.encoder import TransformerEncoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("nothing_compiled"),
]

B, T, D, HEADS = 4, 128, 256, 4
# Of the largest value: sums of float32 run in another order, in bfloat16 compiled code rounds once where eager layers
# round after each operation, to 8 bits.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def encoder(dtype: torch.dtype, is_compiled: bool, num_layers: int = 3, **settings) -> TransformerEncoder:
    torch.manual_seed(0)
    defaults = {"num_layers": num_layers, "width": D, "ffn_width": 4 * D, "num_heads": HEADS, "max_positions": T}
    defaults |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    defaults |= {"position_buckets": 32, "position_max_distance": 128}
    module = BertEncoder(encoder_config(**(defaults | settings))).to("cuda", dtype)
    module.is_compiled = is_compiled
    return module


def gradients(module: TransformerEncoder, dtype: torch.dtype, has_padding: bool) -> list[Tensor]:
    """The last states and all gradients, under one seed."""
    torch.manual_seed(1)
    embeddings = torch.randn(B, T, D, device="cuda").to(dtype).requires_grad_()
    mask = torch.zeros(B, T, dtype=torch.bool, device="cuda")
    mask[1, T // 2 :] = True
    states = module(embeddings, mask if has_padding else None)[-1]
    states.float().pow(3).mul(1 - mask.float()[..., None]).mean().backward()
    return [states.detach()[~mask], embeddings.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_compiled_layers_match_eager_layers(dtype: torch.dtype, has_padding: bool) -> None:
    pytest.importorskip("triton")
    found, expected = (gradients(encoder(dtype, way).eval(), dtype, has_padding) for way in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        largest = other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=TOLERANCES[dtype] * largest + 1e-7)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_computed_again_drop_the_same_values(is_compiled: bool) -> None:
    """Up to the order of sums by atomic additions, which changes from run to run; other dropout would be far off."""
    if is_compiled:
        pytest.importorskip("triton")
    results = []
    for recomputes in (False, True):
        module = encoder(torch.float32, is_compiled, activation_checkpointing=recomputes).train()
        results.append(gradients(module, torch.float32, has_padding=True))
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-4, atol=1e-6)
