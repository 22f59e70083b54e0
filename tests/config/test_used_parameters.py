"""Every parameter that learns receives a gradient from every micro-batch, in every recipe.

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

TINY = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*_tiny.yaml"))


def without_gradient(name: str) -> list[str]:
    """The parameters that learn and have no gradient after one micro-batch."""
    cfg = compose_recipe(name, ["task.data=DATA"])
    task = build_task(cfg.task, vocabulary_size=100)
    model = models.build_model(cfg.model, task).train()
    if model.awaits_token_counts:
        model.set_token_counts(synthetic_counts(task))
    loss, _, _ = task.build_criterion(cfg.criterion)(model, make_synthetic_text(task, 2).batches[0])
    loss.backward()
    learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning
    return [name for name, parameter in learning if parameter.grad is None]


@pytest.mark.parametrize("name", TINY)
def test_recipes_have_no_unused_parameter(name: str) -> None:
    assert without_gradient(name) == []


def test_an_unused_parameter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An additional layer that is never called."""
    build = models.build_model

    def build_with_unused(*args):
        model = build(*args)
        model.unused = nn.Linear(2, 1)
        return model

    monkeypatch.setattr(models, "build_model", build_with_unused)
    assert without_gradient("mlm_tiny") == ["unused.weight", "unused.bias"]
