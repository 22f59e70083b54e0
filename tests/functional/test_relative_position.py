"""Buckets of relative positions against Hugging Face's MPNet, scalar loops and hand values; their spread over all pairs."""

import math

import pytest
import torch
from small_models import encoder_config
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from amos_fairseq.functional.attention import AttentionBias, as_attention_mask
from amos_fairseq.functional.relative_position import amos_bucket, t5_bucket
from amos_fairseq.modules.bert_encoder import RelativePositionBias

DISTANCES = torch.arange(-600, 601)


def relative_bias(scheme: str, num_buckets: int, max_distance: int, num_heads: int = 4) -> RelativePositionBias:
    sizes = {"position_buckets": num_buckets, "position_max_distance": max_distance, "num_heads": num_heads}
    return RelativePositionBias(encoder_config(position_scheme=scheme, **sizes))


@pytest.mark.parametrize("sizes", [(32, 128), (64, 128), (32, 512), (16, 40), (8, 9), (4, 3), (33, 128)])
def test_t5_buckets_are_those_of_hugging_face(sizes):
    assert torch.equal(t5_bucket(DISTANCES, *sizes), MPNetEncoder.relative_position_bucket(DISTANCES, *sizes))


def amos_row(distance: int, num_buckets: int, max_distance: int) -> int:
    """The scheme of the released AMOS checkpoint: ceil, base (max - 1) / exact, signed, shifted."""
    side = num_buckets // 2
    exact = side // 2
    bucket = abs(distance)
    if bucket >= exact:
        in_base = math.log(bucket / exact, (max_distance - 1) / exact)
        bucket = min(exact + math.ceil(in_base * (side - 1 - exact) - 1e-9), side - 1)
    return int(math.copysign(bucket, distance)) + side - 1


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(64, 128), (32, 128), (64, 500), (16, 40)])
def test_amos_buckets_are_those_of_a_scalar_loop(num_buckets, max_distance):
    expected = [amos_row(distance, num_buckets, max_distance) for distance in DISTANCES.tolist()]
    rows = amos_bucket(DISTANCES, num_buckets, max_distance)
    assert rows.tolist() == expected
    assert (rows.min(), rows.max()) == (0, num_buckets - 2)


def test_amos_buckets_by_hand():
    # 64 buckets: 0..15 exact, 16 is 16, 17 is 16 + ceil(15 ln(17/16) / ln(127/16)) = 17; 127 and beyond 31; + 31 by sign.
    distances = torch.tensor([0, 1, -1, 15, -15, 16, 17, 126, 127, 128, 600, -600])
    assert amos_bucket(distances, 64, 128).tolist() == [31, 32, 30, 46, 16, 47, 48, 62, 62, 62, 62, 0]


@pytest.mark.parametrize("scheme", ["t5", "amos"])
def test_bias_of_a_pair_is_a_row_of_the_table(scheme):
    torch.manual_seed(0)
    module = relative_bias(scheme, 16, 20, 3)
    bias = module(40)
    for query in range(40):
        for key in range(40):
            distance = key - query
            if scheme == "t5":
                row = int(MPNetEncoder.relative_position_bucket(torch.tensor(distance), 16, 20))
            else:
                row = amos_row(distance, 16, 20)
            assert torch.equal(bias[:, query, key], module.table.weight[row])


@pytest.mark.parametrize("scheme", ["t5", "amos"])
def test_longer_sequences_share_the_table(scheme):
    """The table has as many rows as buckets, and a long sequence's bias begins with a short one's."""
    module = relative_bias(scheme, 32, 128, 2)
    assert module.table.weight.shape == (32, 2)
    assert torch.equal(module(300)[:, :50, :50], module(50))


@pytest.mark.parametrize(("scheme", "num_buckets", "smallest"), [("t5", 32, 9), ("amos", 64, 18)])
def test_the_smallest_maximum_distance_has_a_logarithmic_bucket(scheme: str, num_buckets: int, smallest: int) -> None:
    assert relative_bias(scheme, num_buckets, smallest, 2)(100).isfinite().all()
    with pytest.raises(ValueError, match=f"give more than {smallest - 1}"):
        relative_bias(scheme, num_buckets, smallest - 1, 2)


def table_gradient_by_hand(module: RelativePositionBias, gradient: torch.Tensor) -> torch.Tensor:
    """Float64: each entry of ``gradient`` [H,T,T] added to the row of its bucket."""
    length = gradient.size(-1)
    places = torch.arange(length)
    rows = module.bucket(places - places[:, None], module.table.num_embeddings, module.max_distance)  # [T,T]
    sums = torch.zeros(module.table.num_embeddings, len(gradient), dtype=torch.float64)
    return sums.index_add_(0, rows.flatten(), gradient.double().flatten(1).T)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(("scheme", "num_buckets"), [("t5", 32), ("amos", 64)])
def test_the_gradient_of_a_table_in_bfloat16_is_summed_in_float32(scheme: str, num_buckets: int, mean: float) -> None:
    """The far buckets sum some 100,000 entries. One rounding to bfloat16 is a relative error of up to 2^-8."""
    torch.manual_seed(0)
    module = relative_bias(scheme, num_buckets, 128).to(torch.bfloat16)
    gradient = (torch.randn(4, 512, 512) + mean).to(torch.bfloat16)
    bias = module(512)
    bias.backward(gradient.to(bias.dtype))
    assert module.table.weight.grad.dtype == torch.bfloat16
    exact = table_gradient_by_hand(module, gradient)
    assert (module.table.weight.grad.double() - exact).norm() < 2**-8 * exact.norm()


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_gradient_through_a_mask_that_all_layers_share(mean: float) -> None:
    """12 layers give a mask in bfloat16 a gradient each, which autograd adds in bfloat16. Those 11 roundings of every entry
    go in both directions and average out over a diagonal; what is left is the last rounding, 2^-8."""
    torch.manual_seed(0)
    module = relative_bias("t5", 32, 128).to(torch.bfloat16)
    mask = as_attention_mask(AttentionBias(learned=module(512)), torch.bfloat16)
    gradients = [(torch.randn(4, 512, 512) + mean).to(torch.bfloat16) for _ in range(12)]
    torch.autograd.backward([mask * 1 for _ in gradients], [gradient[None] for gradient in gradients])
    exact = table_gradient_by_hand(module, torch.stack([gradient.double() for gradient in gradients]).sum(0))
    assert (module.table.weight.grad.double() - exact).norm() < 2**-7 * exact.norm()
