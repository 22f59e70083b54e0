"""Fine-tuning one encoder on several tasks of texts at once, with a head for each (thesis, section 3.2.1)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.tasks import register_task
from omegaconf import MISSING, OmegaConf
from torch import Tensor, nn

from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.classification.dataset import read_targets, read_task_record
from amos_fairseq.downstream.classification.task import (
    TextClassificationConfig,
    TextClassificationTask,
    read_teacher,
    vocabulary_of,
)
from amos_fairseq.downstream.multi_task.dataset import MixedTasks
from amos_fairseq.errors import UserError
from amos_fairseq.models.fine_tuning import TextModel
from amos_fairseq.modules.heads import pool


class MultiTaskModel(TextModel):
    """A head for each task, of its name."""

    def forward(
        self, src_tokens: Tensor, rows_of_heads: Mapping[str, Tensor], lengths: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits [b, classes] of each head for the rows of its task.

        Args:
            src_tokens: [B,T] int64.
            rows_of_heads: for each head the rows of its task, [b] int64, maybe none.
            lengths: see :meth:`extract_features`.
        """
        states = self.extract_features(src_tokens, lengths)
        pooled = pool(states, self.padding_mask(src_tokens), str(self.cfg.pooling))
        return {name: self.classification_heads[name].classify(pooled[rows]) for name, rows in rows_of_heads.items()}


@dataclass
class MultiTaskConfig(TextClassificationConfig):
    data: str = field(
        default=MISSING,
        metadata={
            "help": "directories with task.json, of amos prepare glue or amos classify, separated by ':'; each task gets a "
            "head of its name"
        },
    )


@dataclass(frozen=True)
class TextTask:
    """One of the tasks.

    Attributes:
        record: content of ``task.json``.
        scale: of a number: the smallest of the training set, and the distance to the largest. The head learns values from 0 to
            1, as in thesis, section 3.2.1, but without a sigmoid.
    """

    directory: Path
    record: dict[str, Any]
    scale: tuple[float, float] | None

    @classmethod
    def of(cls, directory: Path, train_subset: str) -> "TextTask":
        """Read a prepared directory; raise :class:`UserError` if it cannot be used."""
        record = read_task_record(directory, "give directories with task.json, separated by ':'")
        name = record["task"]
        if "." in name or hasattr(nn.ModuleDict(), name):
            raise UserError(
                f"{directory}: a head cannot have the name of the task, {name!r}: give the task another one"
            )
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
    """The rows of all tasks are shuffled together, also within a batch: see ``MixedTasks``.

    Attributes:
        text_tasks: by name, in the order of ``data``.
    """

    cfg: MultiTaskConfig
    model_class = MultiTaskModel

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, text_tasks: dict[str, TextTask]) -> None:
        super().__init__(cfg, vocabulary, dictionary, {})
        self.text_tasks = text_tasks

    @classmethod
    def setup_task(cls, cfg: MultiTaskConfig, **kwargs: Any) -> "MultiTask":
        """Read vocabulary and tasks; raise :class:`UserError` for directories or settings that cannot be used."""
        if OmegaConf.is_missing(cfg, "data"):
            raise UserError(
                "no data are given: give directories with task.json, separated by ':', as task.data=DIR:DIR"
            )
        directories = [Path(part) for part in str(cfg.data).split(os.pathsep)]
        text_tasks: dict[str, TextTask] = {}
        for directory in directories:
            task = TextTask.of(directory, cfg.train_subset)
            name = task.record["task"]
            if name in text_tasks:
                raise UserError(
                    f"{directory} and {text_tasks[name].directory} are both the task {name}: give one of them"
                )
            text_tasks[name] = task
        return cls(cfg, *vocabulary_of(directories, cfg.separator_token), text_tasks)

    def has_sharded_data(self, split: str) -> bool:
        """Return False: the folders of ``data`` are tasks, not shards of which each epoch reads another one."""
        return False

    def add_head(self, model: TextModel) -> None:
        for name, task in self.text_tasks.items():
            model.register_classification_head(name, task.record["num_classes"], task.scale)
        model.head_of_task = {name: name for name in self.text_tasks}

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the rows of ``split`` of all tasks; raise :class:`UserError` if files are missing."""
        training, teachers = split == self.cfg.train_subset, {}
        if training and self.cfg.teacher is not None:
            teachers = self._read_teachers(split)
        tasks = {
            name: self.rows_of(task.directory, split, task.record, training, teachers.get(name))
            for name, task in self.text_tasks.items()
        }
        self.datasets[split] = MixedTasks(tasks, split, self.dictionary, self.cfg.seed, training)

    def _read_teachers(self, split: str) -> dict[str, np.ndarray]:
        """Divide the array of predictions, [rows, outputs] of one task after the other in one dimension."""
        shapes = {
            name: (self.number_of_rows(task.directory, split, task.record), task.record["num_classes"])
            for name, task in self.text_tasks.items()
        }
        sizes = [rows * outputs for rows, outputs in shapes.values()]
        parts = np.split(read_teacher(Path(self.cfg.teacher), (sum(sizes),)), np.cumsum(sizes)[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
