"""Values of settings that are refused before anything is built, and those of the recipes, which are not."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.optim.grouped_adam import GroupedAdamConfig
from amos_fairseq.recipes.composition import compose_recipe, compose_with_hydra
from amos_fairseq.run import hooks
from amos_fairseq.setting_checks import RANGES, check_config, check_configuration, check_fit

REGISTERED = [*MODEL_DATACLASS_REGISTRY.values(), *CRITERION_DATACLASS_REGISTRY.values()]
OURS = [fields for fields in REGISTERED if fields.__module__.startswith("amos_fairseq")]
OURS += [TASK_DATACLASS_REGISTRY["text_pretraining"], TASK_DATACLASS_REGISTRY["squad"], GroupedAdamConfig]


@pytest.mark.parametrize("fields", OURS, ids=lambda fields: fields.__name__)
def test_every_number_of_this_package_has_a_range(fields: type) -> None:
    """Numbers that another section owns are checked there."""
    assert OPTIMIZER_REGISTRY["grouped_adam"]
    for field in dataclasses.fields(fields):
        if field.type in (int, float) and not str(field.default).startswith("${"):
            assert field.metadata.get("range") in RANGES, field.name


def launch(override: str) -> None:
    """What fairseq-hydra-train does before it launches its ranks."""
    cfg = compose_with_hydra("amos_tiny", ["task.data=DATA", override], with_hydra_settings=False)
    hooks.add_defaults(add_defaults, cfg)
    check_configuration(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimization.lr=[0]", "optimization.lr (--lr) 0.0 must be above 0"),
        ("optimization.lr=[nan]", "optimization.lr (--lr) nan must be a finite number, above 0"),
        ("lr_scheduler.end_learning_rate=inf", "lr_scheduler.end_learning_rate (--end-learning-rate) inf must be"),
        ("optimization.update_freq=[1,0]", "optimization.update_freq (--update-freq) 0 must be 1 or more"),
        ("task.mask_prob=much", "task.mask_prob: Value 'much' of type 'str' could not be converted to Float"),
        ("+task.mask_probability=0.1", "task.mask_probability: Key 'mask_probability' not in 'TextPretrainingConfig'"),
        ("task._name=5", "there is no task '5' (task._name, by flag --task)"),
        ("model.dropout=-0.1", "model.dropout (--dropout) -0.1 must be 0 or more and below 1"),
        ("model.relative_position_scheme=t6", "model.relative_position_scheme: Invalid value 't6', expected one of"),
        ("lr_scheduler.power=soon", "lr_scheduler.power: Value 'soon' of type 'str' could not be"),
        # The criterion's copy alone would have no effect: the model has no head for it.
        (
            "+criterion.encoder_mlm_weight=5",
            "criterion.encoder_mlm_weight is 5.0, model.encoder_mlm_weight 0.0: set only model",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_what_is_allowed(override: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        launch(override)
    assert str(refused.value).startswith(line), str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    ["amos_tiny model.encoder_mlm_weight=5", "electra_modern_mini", "electric_base", "mlm_small", "teams_large"],
)
def test_the_recipes_are_accepted(words: str) -> None:
    recipe, *overrides = words.split()
    check_configuration(compose_recipe(recipe, ["task.data=DATA", *overrides]))


def named(**changes: Any) -> Any:
    sections = {"task": "text_pretraining", "model": "amos_tiny", "criterion": "amos", "optimizer": "grouped_adam"}
    sections |= {"lr_scheduler": "polynomial_decay", **changes}
    return OmegaConf.create({kind: {"_name": it} if isinstance(it, str) else it for kind, it in sections.items()})


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        (
            "task",
            "text_pretrainin",
            r"no task 'text_pretrainin' \(task\._name, by flag --task\): did you mean text_pretraining",
        ),
        ("optimizer", None, "no optimizer 'None' .optimizer._name, by flag --optimizer"),
        ("lr_scheduler", "polynomial", "did you mean polynomial_decay"),
        # What a recipe's optimizer or scheduler has and another one lacks is listed at once.
        (
            "optimizer",
            {"_name": "adam", "bias_correction": True, "layer_wise_lr_decay": 1.0},
            "adam does not have .*: add ~optimizer.bias_correction ~optimizer.layer_wise_lr_decay$",
        ),
        ("optimizer", {"_name": "grouped_adam", "adam_ep": 1e-6}, "adam_ep.*not in"),
    ],
)
def test_names_and_settings_that_do_not_exist(section: str, given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(named(**{section: given}))


OBJECTIVES = ("amos", "electra", "electric", "mlm", "teams")
PAIRS = [
    # task, model, criterion -> what the line says; None: they fit
    *(("text_pretraining", model, name, None) for name in OBJECTIVES for model in (name, f"{name}_tiny")),
    ("text_pretraining", "electra", "amos", r"criterion amos .*give --criterion electra .*--arch amos_base"),
    ("squad", "electra_tiny", "amos", r"criterion amos .*give --task text_pretraining"),
    ("text_pretraining", "electra_tiny", "squad", r"criterion squad .*give --task squad"),
    (
        "text_pretraining",
        "roberta",
        "cross_entropy",
        r"criterion cross_entropy .*give --criterion amos .criterion._name.$",
    ),
    # Stock criterions and models, and fine-tuning of any architecture.
    ("squad", "teams_tiny", "squad", None),
    ("sentence_prediction", "mlm_tiny", "sentence_prediction", None),
    ("masked_lm", "roberta", "masked_lm", None),
    (
        "text_pretraining",
        "roberta",
        "electra",
        r"model roberta.*give an architecture of electra such as --arch electra_base",
    ),
    ("text_pretraining", "a_users_own", "electra", None),
]


@pytest.mark.parametrize(("task", "model", "criterion", "line"), PAIRS)
def test_which_task_model_and_criterion_fit(task: str, model: str, criterion: str, line: str | None) -> None:
    with pytest.raises(UserError, match=line) if line else nullcontext():
        check_fit(named(task=task, model=model, criterion=criterion))
