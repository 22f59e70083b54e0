"""Every parameter that learns gets a gradient from every micro-batch, in every recipe and variant.

DistributedDataParallel is built without a search for unused parameters (fairseq's default): it would wait for a gradient
that does not come, and refuse the next forward pass. Gradients are compared with ``None``, as its hooks are.
"""

import pytest
from fairseq import models
from torch import nn

from amos_fairseq.bench.fairseq_step import synthetic_counts
from amos_fairseq.bench.synthetic_text import make_synthetic_text
from amos_fairseq.composition import RECIPES, compose_recipe
from amos_fairseq.flops.recipe import build_task
from amos_fairseq.modules.mixture import STRATEGIES

TINY = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*_tiny.yaml"))
# What AMOS has no recipe for.
OF_AMOS = [
    *([f"model.mixture={strategy}"] for strategy in STRATEGIES if strategy != "fixed"),
    ["model.mixture=fixed", "model.fixed_mixture_weights='0.4,0.6'"],
    ["model.separate_generators=true"],
    ["model.no_stop_gradient=true"],
    ["model.adversarial_mlm_multiplier=0.5"],
    ["model.gumbel_entries=0"],
    ["model.kernels=reference"],
    ["model.relative_position_scheme=amos"],
    ["model.embedding_dim=16"],
]


def without_gradient(name: str, *overrides: str) -> tuple[nn.Module, list[str]]:
    """The model after one micro-batch, and what it did not train."""
    cfg = compose_recipe(name, ["task.data=DATA", *overrides])
    task = build_task(cfg.task, vocabulary_size=100)
    model = models.build_model(cfg.model, task).train()
    if model.awaits_token_counts:
        model.set_token_counts(synthetic_counts(task))
    loss, _, _ = task.build_criterion(cfg.criterion)(model, make_synthetic_text(task, 2).batches[0])
    loss.backward()
    learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning
    return model, [name for name, parameter in learning if parameter.grad is None]


@pytest.mark.parametrize("name", TINY)
def test_recipes_have_no_unused_parameter(name: str) -> None:
    assert without_gradient(name)[1] == []


@pytest.mark.parametrize("overrides", OF_AMOS, ids=lambda overrides: overrides[0])
def test_settings_of_amos_have_no_unused_parameter(overrides: list[str]) -> None:
    assert without_gradient("amos_tiny", *overrides)[1] == []


def test_an_unused_parameter_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second detection head that nothing calls."""
    build = models.build_model

    def build_with_more(*args):
        model = build(*args)
        model.left_over = nn.Linear(2, 1)
        return model

    monkeypatch.setattr(models, "build_model", build_with_more)
    assert without_gradient("mlm_tiny")[1] == ["left_over.weight", "left_over.bias"]
