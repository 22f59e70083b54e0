"""Several tasks of texts with one encoder and a head each (thesis, chapter 3): model, fairseq's task and criterion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor, nn

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.downstream.labeled_task import AVERAGE, LabeledCriterion, MixedTasks, log_means, prepared_directories
from amos_fairseq.downstream.model import TextModel
from amos_fairseq.downstream.texts.dataset import head_outputs, read_targets, read_task_record
from amos_fairseq.downstream.texts.scores import average_score
from amos_fairseq.downstream.texts.task import (
    TextClassificationConfig,
    TextClassificationTask,
    outputs_shape,
    read_teacher,
    scores_of,
    sum_to_score,
    text_loss,
    vocabulary_of,
)
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import SAMPLING_EXPONENT
from amos_fairseq.modules.heads import pool
from amos_fairseq.setting_checks import setting

LOSS, ROWS = "loss_", "_rows_"  # and the name of a task
# And kind, main score, whether that is in the average (1 or 0), and name of a task, divided by /.
SUM = "_sum/"


class MultiTaskModel(TextModel):
    def forward(
        self, src_tokens: Tensor, rows_of_heads: Mapping[str, Tensor], lengths: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits [b, classes] of each head for its rows, [b] int64, of the tokens [B,T] int64."""
        states = self.extract_features(src_tokens, lengths)
        pooled = pool(states, self.padding_mask(src_tokens), str(self.cfg.pooling))
        return {name: self.classification_heads[name].classify(pooled[rows]) for name, rows in rows_of_heads.items()}


@dataclass
class MultiTaskConfig(TextClassificationConfig):
    data: str = setting(
        MISSING,
        "directories with task.json, of amos prepare glue or amos classify, separated by ':'; each task gets a "
        "head of its name",
    )
    sampling_exponent: float = setting(
        SAMPLING_EXPONENT,
        "of the tasks: the share of one of |D| rows is proportional to |D| to this power (0: equal shares)",
        "0 or more and at most 1",
    )


@dataclass(frozen=True)
class TextTask:
    """One of the tasks. ``record``: content of ``task.json``; ``scale``: of a number, the smallest of the training set, and the
    distance to the largest. The head learns values from 0 to 1, as in thesis, section 3.2.1, but without a sigmoid."""

    directory: Path
    record: dict[str, Any]
    scale: tuple[float, float] | None

    @classmethod
    def of(cls, directory: Path, train_subset: str) -> "TextTask":
        record = read_task_record(directory)
        scale = None
        if record["kind"] == "number":
            values = read_targets(directory, train_subset, record)
            scale = float(values.min()), float(values.max() - values.min())
            if scale[1] == 0:
                raise UserError(f"{directory}: each row has the label {scale[0]:g}: there is nothing to learn")
        return cls(directory, record, scale)

    @property
    def kind(self) -> str:
        return self.record["kind"]


@register_task("multi_task", dataclass=MultiTaskConfig)
class MultiTask(TextClassificationTask):
    """The rows of all tasks are shuffled together, also within a batch: see ``MixedTasks``. ``text_tasks`` are in the order of
    ``data``."""

    cfg: MultiTaskConfig
    model_class = MultiTaskModel

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, text_tasks: dict[str, TextTask]) -> None:
        super().__init__(cfg, vocabulary, dictionary, {})
        self.text_tasks = text_tasks

    @classmethod
    def setup_task(cls, cfg: MultiTaskConfig, **kwargs: Any) -> "MultiTask":
        directories = prepared_directories(cfg)
        text_tasks: dict[str, TextTask] = {}
        for directory in directories:
            task = TextTask.of(directory, cfg.train_subset)
            name = task.record["task"]
            if name in text_tasks or "." in name or hasattr(nn.ModuleDict(), name):
                raise UserError(f"{directory}: there is another task {name!r}, or no head can have the name: rename it")
            text_tasks[name] = task
        return cls(cfg, *vocabulary_of(directories, cfg.separator_token), text_tasks)

    def add_head(self, model: TextModel) -> dict[str, HeadOutputs]:
        for name, task in self.text_tasks.items():
            model.register_classification_head(name, task.record["num_classes"], task.scale)
        model.head_of_task = {name: name for name in self.text_tasks}
        return {name: replace(head_outputs(task.record), name=name) for name, task in self.text_tasks.items()}

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        training, teachers = split == self.cfg.train_subset, {}
        if training and self.cfg.teacher is not None:
            teachers = self._read_teachers(split)
        tasks = {
            name: self.rows_of(task.directory, split, task.record, training, teachers.get(name))
            for name, task in self.text_tasks.items()
        }
        self.datasets[split] = MixedTasks(tasks, split, self.cfg.seed, training, self.cfg.sampling_exponent)

    def _read_teachers(self, split: str) -> dict[str, np.ndarray]:
        """Divide the array of predictions, [rows, outputs] of one task after the other in one dimension."""
        shapes = {name: outputs_shape(task.directory, split, task.record) for name, task in self.text_tasks.items()}
        sizes = [rows * outputs for rows, outputs in shapes.values()]
        arrays = np.split(read_teacher(Path(self.cfg.teacher), (sum(sizes),)), np.cumsum(sizes)[:-1])
        return {name: array.reshape(shape) for (name, shape), array in zip(shapes.items(), arrays, strict=True)}


@register_criterion("multi_task")
class MultiTaskCriterion(LabeledCriterion):
    """L = 1/B sum_b l(row b), nats, with l of ``amos_fairseq.downstream.texts.task.text_loss`` for the task that
    row b is of; B is the number of rows of an update (thesis, section 3.2).

    Tasks have no weights: their shares of an update are those of ``MixedTasks``. Numbers are scaled to 0 to 1. In validation
    the main score of each task and their ``average`` are computed from all rows. The task sets ``gold_weight``, lambda.

    Departures: the thesis sums over rows, which Adam does not see, except for its epsilon and the clipping.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.text_tasks, self.gold_weight = task.text_tasks, 1.0

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        logits, num_rows = model(**sample["net_input"]), sample["nsentences"]
        log = {"ntokens": sample["ntokens"], "nsentences": num_rows, "sample_size": num_rows}
        losses = []
        for name, task in self.text_tasks.items():
            task_logits, labels = logits[name].float(), sample["labels"][name]
            deviation = 1.0 if task.scale is None else task.scale[1]
            losses.append(text_loss(task.kind, task_logits, labels, deviation, self.gold_weight))
            log |= {f"{LOSS}{name}": losses[-1].detach(), f"{ROWS}{name}": len(task_logits)}
            if "teacher" in labels:
                log["_gold_weight"] = self.gold_weight * num_rows
            if not model.training:
                main, is_averaged = task.record["scores"][0], task.record.get("in_average", False)
                key = f"{SUM}{task.kind}/{main}/{int(is_averaged)}/{name}"
                log[key] = sum_to_score(task.kind, task_logits, labels)
        loss = torch.stack(losses).sum()
        return loss, num_rows, log | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss of all rows and of each task's and, in validation, the scores of all rows so far."""
        scores: dict[str, Callable[[Any], float]] = {}
        averaged: list[str] = []
        totals = log_means(logging_outputs, "loss", "_gold_weight")
        for key, total in totals.items():
            if key.startswith(LOSS):
                count = float(totals[f"{ROWS}{key.removeprefix(LOSS)}"])
                metrics.log_scalar(key, mean(total, count), count, round=4)
            if key.startswith(SUM):
                metrics.log_scalar_sum(key, total.cpu())
                kind, main, is_averaged, name = key.removeprefix(SUM).split("/")
                scores[name] = log_main_score(key, name, kind, main)
                averaged += [name] if is_averaged == "1" else []

        def average(meters: Any) -> float:
            return round(average_score({name: score(meters) for name, score in scores.items()}, averaged), 4)

        if scores:
            metrics.log_derived(AVERAGE, average)


def log_main_score(key: str, name: str, kind: str, main: str) -> Callable[[Any], float]:
    """Log the score ``main`` of a task, and return it as a function of the meters."""
    scores = scores_of(key, kind)

    def score(meters: Any) -> float:
        return round(scores(meters)[main], 4)

    metrics.log_derived(f"{main}_{name}", score)
    return score
