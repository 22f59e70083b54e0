"""Counts of products by hand; FLOPs of whole recipes: formulas by hand, every objective and variant."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig
from saved_models import write_untrained
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq import flops as counting
from amos_fairseq.errors import UserError
from amos_fairseq.flops import build_update, count_matmuls, report_flops, training_flops
from amos_fairseq.recipes import RECIPES
from amos_fairseq.recipes.composition import compose_recipe

META = torch.device("meta")
B, T, D = 3, 5, 8
V = 30_522  # BERT's vocabulary
ROWS = 30_528  # the next multiple of 64


def runs_other_code(variant: Path) -> bool:
    """Whether it sets a choice, a switch, or a weight to 0; other numbers lead through the code of its base."""
    stated = yaml.safe_load(variant.read_text(encoding="utf-8"))
    values = [value for group in ("model", "criterion") for value in stated.get(group, {}).values()]
    return any(isinstance(value, (bool, str)) or value == 0 for value in values)


# In tiny sizes: every objective, and every variant with code of its own; tests/cuda/test_steps.py has the settings of AMOS.
NAMES = [path.stem for path in sorted(RECIPES.glob("*.yaml"))]
OBJECTIVES = [[name] for name in NAMES if name.endswith(("_tiny", "modern_mini", "deberta_mini"))]
OVERLAYS = [path for path in sorted(RECIPES.glob("variants/*.yaml")) if not path.stem.startswith("amos_")]
VARIANTS = [[f"variants/{path.stem}", "+sizes=tiny"] for path in OVERLAYS if runs_other_code(path)]


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device=META)


STATES = on_meta(B, T, D)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: on_meta(B, T, D) @ on_meta(D, V), 2 * B * T * D * V),
        (lambda: on_meta(T, D) @ on_meta(D), 2 * T * D),
        (lambda: torch.bmm(on_meta(B, T, D), on_meta(B, D, T)), 2 * B * T * T * D),
        (lambda: functional.gelu(STATES + STATES * 2).softmax(-1), 0),
    ],
)
def test_products_of_single_operators(call, expected: int) -> None:
    assert count_matmuls(call)["Global"] == expected


def test_products_of_attention() -> None:
    """Fused kernels would be counted by other formulas, or, on a CPU, not at all."""
    from amos_fairseq.modules.bert_encoder import SelfAttention

    with META:
        attention = SelfAttention(D, num_heads=2, dropout=0.0)
    # q, k, v, output; q k^T and weights v
    assert count_matmuls(lambda: attention(STATES))["Global"] == B * (2 * T * D * 4 * D + 4 * T * T * D)


def test_products_by_module() -> None:
    with META:
        model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Linear(D, V), nn.GELU()))
    counts = count_matmuls(lambda: model(STATES))
    first, second = 2 * B * T * D * D, 2 * B * T * D * V
    assert (counts["Sequential.0"], counts["Sequential.1"]) == (first, second)
    assert counts["Sequential"] == counts["Global"] == first + second


def test_products_of_a_backward_pass() -> None:
    weight = on_meta(D, V).requires_grad_()
    forward = 2 * B * T * D * V
    assert count_matmuls(lambda: (STATES @ weight).sum().backward())["Global"] == 2 * forward
    states = on_meta(B, T, D).requires_grad_()
    assert count_matmuls(lambda: (states @ weight).sum().backward())["Global"] == 3 * forward


def recipe(name: str, *overrides: str) -> DictConfig:
    return compose_recipe(name, ["distributed_training.distributed_world_size=1", *overrides])


def layers(num_layers: int, width: int, length: int) -> int:
    """Matrix products of an encoder over one sequence: attention 8 T D^2 + 4 T^2 D, feed-forward (4 D wide) 16 T D^2."""
    return num_layers * (24 * length * width**2 + 4 * length**2 * width)


def mlm_head(positions: int, width: int, embedded: int) -> int:
    return 2 * positions * width * embedded


def output_layer(positions: int, embedded: int) -> int:
    return 2 * positions * embedded * ROWS


def skipped(length: int, positions: int, width: int) -> int:
    """Products of a last layer after its attention that the fast kernels leave out: only ``positions`` are predicted."""
    return (length - positions) * (2 + 16) * width**2


def test_mlm_flops_by_formula() -> None:
    """BERT-Small: 128 sequences of 128 tokens, 20 of them masked; every product has two operands that learn. The fast output
    layer computes its logits again in the backward pass."""
    projection = 2 * 128 * 128 * 256
    forward = layers(12, 256, 128) + projection + mlm_head(20, 256, 128) + output_layer(20, 128)
    flops = training_flops(recipe("mlm_small"), V, reference=True)
    assert flops.per_update == 128 * 3 * forward
    assert flops.per_token == 3 * forward / 128
    assert flops.total == 1_450_000 * 128 * 3 * forward
    fast = 3 * (forward - skipped(128, 20, 256)) + output_layer(20, 128)
    assert training_flops(recipe("mlm_small"), V).per_update == 128 * fast


@pytest.mark.slow
def test_electra_flops_by_formula() -> None:
    """ELECTRA-Small: loss and samples share one product with the vocabulary, which the reference computes twice."""
    projections = 2 * 128 * 128 * (256 + 64)
    head = mlm_head(20, 64, 128) + 2 * 128 * 256 * 256 + 2 * 128 * 256
    vocabulary = output_layer(20, 128)
    forward = layers(12, 256, 128) + layers(12, 64, 128) + projections + head + vocabulary
    cfg = recipe("electra_small")
    assert training_flops(cfg, V, reference=True).per_update == 128 * (3 * forward + vocabulary)
    fast = forward - skipped(128, 20, 64)
    assert training_flops(cfg, V).per_update == 128 * (3 * fast + vocabulary)  # computed again in the backward pass


def test_amos_flops_by_formula() -> None:
    """AMOS-small without a relative position table: depths 4, 6, 8 with an MLM head each, 20 masked positions.

    Layers 5 and 7 read a detached state, so their query-key-value product has no gradient toward its input (the residual
    keeps the one of the feed-forward product). Sampling multiplies with detached embeddings twice, for the logits and for
    the expected embedding of Gumbel-Softmax, and passes a gradient to the other side alone. The gradient of v . f toward f
    is an elementwise multiplication in PyTorch.
    """
    encoder, generator = layers(12, 256, 128), layers(8, 256, 128)
    predictions = 3 * (mlm_head(20, 256, 256) + output_layer(20, 256))
    detection = 2 * 128 * 256
    stopped = 2 * 2 * 128 * 256 * 768
    sampling = 2 * output_layer(20, 256)
    mixture = 3 * 2 * 20 * 256
    flops = training_flops(recipe("amos_small", "model.relative_position_scheme=none"), V, reference=True)
    expected = 3 * (encoder + generator + predictions + detection) - stopped + 2 * sampling + 2 * mixture
    assert flops.per_update == 128 * expected


def test_flops_of_modernbert_by_formula() -> None:
    """mlm_modern_small: 10 layers of width 384, F = 576, T = 512, 30 % masked; layers 1, 4, 7 and 10 attend to all tokens.

    A layer: 8 T D^2 for the projections of attention, 6 T D F for the gated network, 4 T D for each key of a query. In the
    reference each query has T keys; the fast kernels give it 192 in local layers, and of the last layer they compute the
    masked positions alone after its attention.
    """
    width, ffn_width, length, masked = 384, 576, 512, 154
    products = 8 * length * width**2 + 6 * length * width * ffn_width
    head = mlm_head(masked, width, width) + output_layer(masked, width)
    cfg = recipe("mlm_modern_small")
    forward = 10 * products + 10 * 4 * length**2 * width + head
    assert training_flops(cfg, V, reference=True).per_update == 256 * 3 * forward
    skipped_here = (length - masked) * (2 * width**2 + 6 * width * ffn_width)
    fast = 10 * products + 4 * length * width * (4 * length + 6 * 192) + head - skipped_here
    assert training_flops(cfg, V).per_update == 256 * (3 * fast + output_layer(masked, width))


def test_flops_of_debertas_pair_by_formula() -> None:
    """electra_deberta_mini: T = 128, so 255 of the 512 rows of positions, with a query and a key projection in each layer.

    A query meets T keys by content and 255 rows; so does a key. The mask decoder is the last layer, twice.
    """
    width, length, masked, rows = 128, 128, 20, 255
    layer = layers(1, width, length) + 2 * (2 * length * rows * width)  # of each sequence
    projected = 4 * rows * width**2  # once a batch
    head = mlm_head(masked, width, width) + output_layer(masked, width)
    detection = 2 * length * (width**2 + width)
    cfg = recipe("electra_deberta_mini")
    forward = 32 * (10 * layer + head + detection) + 10 * projected
    assert training_flops(cfg, V, reference=True).per_update == 3 * forward + 32 * output_layer(masked, width)


def test_flops_multiply_with_batches_and_ranks() -> None:
    cfg = recipe("mlm_tiny", "dataset.batch_size=4", "optimization.update_freq=[3]", "optimization.max_update=10")
    one = training_flops(recipe("mlm_tiny", "dataset.batch_size=1", "optimization.update_freq=[1]"), 600)
    flops = training_flops(cfg, 600)
    assert (flops.per_update, flops.tokens_per_update) == (12 * one.per_update, 12 * 64)
    assert flops.total == 10 * flops.per_update
    cfg.distributed_training.distributed_world_size = 2
    cfg.dataset.max_tokens = 2 * 64 + 1  # two blocks
    assert training_flops(cfg, 600).per_update == 12 * one.per_update
    cfg.optimization.update_freq = [1, 2]
    with pytest.raises(UserError, match="changes with the epoch"):
        training_flops(cfg, 600)


def test_a_frozen_generator_has_no_backward_pass(tmp_path: Path) -> None:
    """An encoder of the discriminator's sizes as the generator: two forward passes and one backward."""
    file = write_untrained(tmp_path / "mlm.pt", "mlm_tiny", 600)
    one = ["dataset.batch_size=1", "optimization.update_freq=[1]", f"model.generator_checkpoint={file}"]
    forward = report_flops(recipe("electra_tiny", *one), 600)
    parts = {name: flops * 64 for name, flops in forward.modules.items()}
    encoder = parts["discriminator"] - skipped(64, 10, 64)
    assert parts["frozen_generator"] == pytest.approx(encoder + mlm_head(10, 64, 64))
    learned = parts["discriminator"] + parts["detection_head"]
    assert forward.training.per_update == pytest.approx(sum(parts.values()) + 2 * learned, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OBJECTIVES, *VARIANTS], ids=" ".join)
def test_step_on_a_cpu_has_the_counted_flops_and_uses_every_parameter(name: list[str]) -> None:
    """DistributedDataParallel is built without a search for unused parameters: it waits for every gradient."""
    cfg = recipe(*name, "dataset.batch_size=2", "optimization.update_freq=[1]")
    flops, without_gradient = step_on_cpu(cfg)
    assert flops == training_flops(cfg, 600, reference=True).per_update
    assert without_gradient == []


def step_on_cpu(cfg: DictConfig) -> tuple[int, list[str]]:
    """One training step on real tensors: its matrix products by PyTorch's counter, with our formula for those with a vector,
    and the names of the parameters that learn but receive no gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "DEVICE", torch.device("cpu"))
        real = build_update(cfg, 600, reference=True)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mv: lambda a, *_, **__: 2 * math.prod(a)})
    with counter:
        loss, _, _ = real.criterion(real.model, real.batch)
        loss.backward()
    assert torch.isfinite(loss)
    learning = [(name, parameter) for name, parameter in real.model.named_parameters() if parameter.requires_grad]
    return counter.get_total_flops(), [name for name, parameter in learning if parameter.grad is None]
