"""Every recipe, and every variant with code of its own, takes whole updates on a CUDA device that has no memory: forward and
backward pass, clipping, optimizer and validation, on FakeTensors.

A step fails on what CUDA or PyTorch's fused kernels would refuse (amos_fairseq/measure/fake_cuda.py): tensors of two devices
in one operator, strides or dtypes that a kernel does not take, a host that reads a value. It also fails on a parameter
without a gradient. Values are compared elsewhere.
"""

from importlib.util import find_spec

import pytest
import torch
from fake_steps import FakeRun
from omegaconf import DictConfig
from recipe_names import RECIPE_NAMES, WITH_OTHER_CODE
from synchronization import Operations

from amos_fairseq.functional import sampling
from amos_fairseq.measure.fake_cuda import CudaRuleError, fake_cuda
from amos_fairseq.modules.mixture import STRATEGIES
from amos_fairseq.recipes.composition import compose_recipe

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
OBJECTIVES = ("amos_tiny", "electra_tiny", "electric_tiny", "mlm_tiny", "teams_tiny")
# Settings of AMOS without a recipe of their own, and those of every model.
SETTINGS = [
    *(["amos_tiny", f"model.mixture={strategy}"] for strategy in STRATEGIES if strategy != "fixed"),
    ["amos_tiny", "model.mixture=fixed", "model.fixed_mixture_weights='0.4,0.6'"],
    ["amos_tiny", "model.separate_generators=true"],
    ["amos_tiny", "model.no_stop_gradient=true"],
    ["amos_tiny", "model.adversarial_mlm_multiplier=0.5"],
    ["amos_tiny", "model.gumbel_entries=0"],
    ["amos_tiny", "model.gumbel_entries=20"],
    ["amos_tiny", "model.relative_position_scheme=amos", "model.relative_position_buckets=64"],
    ["electra_tiny", "model.relative_position_scheme=t5"],
    *([recipe, "model.kernels=reference"] for recipe in OBJECTIVES),
    *([recipe, "model.activation_checkpointing=true"] for recipe in OBJECTIVES),
]


def fewer_layers(model: DictConfig) -> list[str]:
    """Overrides that leave two layers in each encoder; TEAMS shares half of its generator, AMOS predicts after layer 8."""
    if model.encoder_layers < 12:
        return []
    if model._name.startswith("teams"):
        return ["model.encoder_layers=4", "model.generator_layers=2"]
    has_generator_layers = "generator_layers" in model and model.generator not in ("uniform", "unigram")
    return ["model.encoder_layers=2", *(["model.generator_layers=2"] if has_generator_layers else [])]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted({*RECIPE_NAMES, *WITH_OTHER_CODE} - {*OBJECTIVES}))
def test_every_recipe_trains_and_validates_in_bfloat16(recipe: str) -> None:
    """With fewer layers where a recipe has twelve or more, because the others have the same shapes.

    The smallest recipes train and validate below, in every precision.
    """
    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, recipe, fewer_layers(compose_recipe(recipe, ["task.data=DATA"]).model))
        run.check_update(run.padded)
        run.check_validation(run.full)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "length"),
    [("bf16", 512), ("bf16", 65), ("bf16", 7), ("float32", 65), ("float32", 512), ("fp16", 65), ("fp16", 128)],
)
@pytest.mark.parametrize("recipe", OBJECTIVES)
def test_every_objective_trains_in_every_precision_at_every_length(recipe: str, precision: str, length: int) -> None:
    """At lengths that are no multiple of 8 a mask needs padded rows. The second update finds the optimizer's moments."""
    overrides = [f"task.tokens_per_sample={length}", "model.max_positions=512"]
    with fake_cuda() as cuda:
        FakeRun.of(cuda, recipe, overrides, precision).check()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["fast", pytest.param("triton", marks=NEEDS_TRITON)])
@pytest.mark.parametrize("recipe", OBJECTIVES)
def test_every_objective_trains_with_deterministic_kernels(
    recipe: str, kernels: str, restored_determinism: None
) -> None:
    """An operator without a fixed order fails the step. Length 128 without dropout is where cuDNN would attend."""
    overrides = ["model.deterministic=true", f"model.kernels={kernels}", "task.tokens_per_sample=128"]
    with fake_cuda() as cuda, Operations() as operations:
        run = FakeRun.of(cuda, recipe, [*overrides, "model.max_positions=128"])
        assert torch.are_deterministic_algorithms_enabled()
        run.check()
    kernels = {"amos_fairseq::attention"} | {f"aten::_scaled_dot_product_{x}_attention" for x in ("flash", "efficient")}
    assert operations.names & kernels
    assert not any("cudnn" in name for name in operations.names)


@pytest.mark.slow
def test_pytorchs_cumulative_sums_would_fail_the_step(
    monkeypatch: pytest.MonkeyPatch, restored_determinism: None
) -> None:
    monkeypatch.setattr(sampling, "running_sums", lambda values: values.cumsum(-1))
    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, "electra_tiny", ["model.deterministic=true"])
        with pytest.raises(CudaRuleError, match="cumsum has no deterministic kernel"):
            run.check_update(run.full)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", SETTINGS, ids=" ".join)
def test_every_setting_trains_and_validates(overrides: list[str]) -> None:
    recipe, *settings = overrides
    with fake_cuda() as cuda:
        run = FakeRun.of(cuda, recipe, settings)
        run.check_update(run.padded)
        run.check_validation(run.full)
