"""Names that do not exist and pairs that do not fit, by flags and through Hydra; the name of the best metric."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run.names import BestMetric, check_config, check_fit


def named(**changes: Any) -> Any:
    sections = {"task": "text_pretraining", "model": "amos_tiny", "criterion": "amos", "optimizer": "grouped_adam"}
    sections |= {"lr_scheduler": "polynomial_decay", **changes}
    return OmegaConf.create({kind: name and {"_name": name} for kind, name in sections.items()})


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        (
            "task",
            "text_pretrainin",
            r"no task 'text_pretrainin' \(task\._name, by flag --task\): did you mean text_pretraining",
        ),
        ("optimizer", None, "no optimizer 'None' .optimizer._name, by flag --optimizer"),
        ("lr_scheduler", "polynomial", "did you mean polynomial_decay"),
    ],
)
def test_names_that_do_not_exist(section: str, name: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(named(**{section: name}))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        # What a recipe's optimizer or scheduler has and another one lacks is listed at once.
        (
            "optimizer",
            {"_name": "adam", "bias_correction": True, "layer_wise_lr_decay": 1.0},
            "adam does not have .*: add ~optimizer.bias_correction ~optimizer.layer_wise_lr_decay$",
        ),
        ("optimizer", {"_name": "grouped_adam", "adam_ep": 1e-6}, "adam_ep.*not in"),
    ],
)
def test_settings_that_cannot_be_used(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(OmegaConf.create(dict(named()) | {section: values}))


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


class OurCriterion:
    __module__ = "amos_fairseq.criterions.made_up"


OURS = OurCriterion()


@pytest.mark.parametrize(
    ("metric", "criterion", "is_refused"),
    [("los", OURS, True), ("loss", OURS, False), ("num_updates", OURS, False), ("x", 3, False)],
)
def test_an_unknown_best_metric_ends_the_run_at_its_first_update(metric: str, criterion: Any, is_refused: bool) -> None:
    """A stock criterion may log more in a validation than in training."""
    cfg = {"checkpoint": {"best_checkpoint_metric": metric}, "dataset": {"disable_validation": False}}
    trainer = SimpleNamespace(cfg=OmegaConf.create(cfg), get_criterion=lambda: criterion)
    logged = {"loss": 1.0, "_hidden": 2}
    line = r"--best-checkpoint-metric los .* is not logged: give one of loss, num_updates$"
    with pytest.raises(UserError, match=line) if is_refused else nullcontext():
        BestMetric().after_update(trainer, logged)
