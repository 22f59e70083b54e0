"""examples/benchmark/changes.py: each change undoes one optimization, keeps the values, and is restored afterwards."""

import pytest
import torch
from benchmark import changes
from small_models import small_amos, small_batch
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq.functional import output_layer
from amos_fairseq.functional.attention import reference_attention
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules import encoder
from amos_fairseq.modules.bert_encoder import SelfAttention

BATCH = PretrainingBatch(**small_batch()["net_input"])


def state(model: torch.nn.Module) -> dict[str, bool | float]:
    attends = {module.attend for module in model.modules() if isinstance(module, SelfAttention)}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(BATCH)
    return {
        "attention": attends == {reference_attention},
        "hidden_dropout": encoder.fast_dropout.__name__ == "<lambda>",
        "output_layer_and_sampling": not model.is_fast,
        "kept_logits": output_layer.CPU_CACHE_BYTES == 0,
        "flops": counter.get_total_flops(),
    }


@pytest.mark.parametrize("change", changes.CHANGES, ids=lambda change: change.__name__)
def test_change_is_undone_and_restored(change) -> None:
    """Equal values up to float32 rounding; all positions of the last layer, or all logits, are more FLOPs."""
    model = small_amos().eval()
    before, expected = state(model), model(BATCH).mlm_nll
    with change(model):
        inside = state(model)
        torch.testing.assert_close(model(BATCH).mlm_nll, expected, rtol=1e-4, atol=1e-5)
    assert state(model) == before
    differs = {key for key in before if inside[key] != before[key]}
    if change is changes.masked_positions_of_the_last_layer:
        assert inside["flops"] > before["flops"]
        assert differs == {"flops"}
    else:
        assert differs - {"flops"} == {change.__name__}


def test_steps_without_a_change() -> None:
    seen = []

    class Step:
        module = small_amos()

        def step(self, batch: dict) -> None:
            seen.append(state(self.module)["kept_logits"])

    changes.Without(Step(), changes.kept_logits).step({})
    changes.Without(Step(), None).step({})
    assert seen == [True, False]
