"""How often a whole update waits for a GPU, by CUDA's own account; skips where there is none."""

import warnings
from importlib.util import find_spec

import pytest
import torch
from fairseq import utils
from fairseq.logging import metrics
from training_step import FairseqStep, random_batches, set_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def weights_after_updates(recipe: str, *overrides: str) -> list[torch.Tensor]:
    """The weights after three updates of 32 sequences of 512 tokens, in bf16."""
    settings = {"precision": "bf16", "device": "cuda", "vocabulary_size": 2_000}
    shape = ("dataset.batch_size=32", "task.tokens_per_sample=512", "model.max_positions=512")
    setup = set_up(recipe, [*shape, "model.attention_dropout=0.1", *overrides], **settings)
    step = FairseqStep(setup)
    for batch in random_batches(setup, 3):
        step.step(batch)
    return [parameter.detach().clone() for parameter in step.module.parameters()]


@pytest.mark.parametrize("recipe", ["amos_tiny", "electra_tiny", "teams_tiny", "electric_tiny", "mlm_tiny"])
def test_deterministic_updates_give_the_same_bits(recipe: str, restored_determinism: None) -> None:
    """At T = 512, where the gradient of the bias, and that of the queries, otherwise depend on the order of additions."""
    first, second = (weights_after_updates(recipe, "model.deterministic=true") for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_give_the_same_bits_without_the_flag() -> None:
    first, second = (weights_after_updates("amos_tiny", "model.kernels=triton") for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("recipe", ["amos_tiny", "electra_tiny", "teams_tiny", "electric_tiny", "mlm_tiny"])
@pytest.mark.parametrize(("precision", "expected"), [("float32", 1), ("bf16", 1), ("fp16", 2)])
def test_an_update_synchronizes_only_for_its_statistics(recipe: str, precision: str, expected: int) -> None:
    """Two micro-batches, on the GPU as they would come there from pinned memory; fp16 reads its norm too."""
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    settings = {"precision": precision, "device": "cuda", "vocabulary_size": 2_000}
    setup = set_up(recipe, ["dataset.batch_size=8"], **settings)
    step, batches = FairseqStep(setup), utils.move_to_cuda(random_batches(setup))
    for batch in batches:  # moments, workspaces, and a loss scale that fits
        step.step(batch)
    before = step.trainer.get_num_updates()
    with warnings.catch_warnings(record=True) as seen, metrics.aggregate(new_root=True):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.trainer.train_step(batches[:2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{warning.filename}:{warning.lineno}" for warning in seen if "synchroniz" in str(warning.message)]
    assert step.trainer.get_num_updates() == before + 1
    assert len(waits) == expected, waits
