"""``amos_fairseq.load`` on a CUDA device."""

import pytest
import torch
from saved_models import write_save_dir

import amos_fairseq

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TEXTS = ["the lazy dog jumps over the fox", "the end", ("the quick fox", "over the lazy dog"), "over"]


def test_features_match_the_cpu(tmp_path):
    """Sums of float32 run in another order there; TF32 is off by default. bfloat16 rounds states of about 1 to 8 bits."""
    write_save_dir(tmp_path)
    expected = amos_fairseq.load(tmp_path)(TEXTS)
    features = amos_fairseq.load(tmp_path, device="cuda", batch_size=2)(TEXTS)
    assert {tensor.device.type for tensor in features} == {"cuda"}
    torch.testing.assert_close(features.states.cpu(), expected.states, atol=1e-4, rtol=0)
    assert torch.equal(features.mask.cpu(), expected.mask)
    half = amos_fairseq.load(tmp_path, device="cuda", dtype=torch.bfloat16)(TEXTS)
    torch.testing.assert_close(half.states.float().cpu(), expected.states, atol=0.2, rtol=0)
    assert half.pooled().shape == (4, 16)
