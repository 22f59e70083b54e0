"""Names of the classes of a fine-tuned head."""

import json
from pathlib import Path
from typing import Any, Optional, Sequence

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained

TASK_FILE = "task.json"


def label_settings(pretrained: Pretrained, num_classes: int, labels: Optional[Sequence[str]]) -> dict[str, Any]:
    """Settings of the exported configuration: the names, and what kind of problem it is.

    ``labels``, else those of the task's data where that still lies where it was, else ``LABEL_0``, ``LABEL_1``, ...

    Raises:
        UserError: another number of labels than classes, or one of them twice.
    """
    names = list(labels or labels_of_task(pretrained, num_classes))
    if len(names) != num_classes or len(set(names)) != num_classes:
        raise UserError(
            f"--labels needs {num_classes} different names, one a class in their order; got {', '.join(names)}"
        )
    regression = bool(pretrained.task.get("regression_target")) or num_classes == 1
    return {
        "num_labels": num_classes,
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "regression" if regression else "single_label_classification",
    }


def labels_of_task(pretrained: Pretrained, num_classes: int) -> list[str]:
    """From the ``task.json`` that ``preprocess/glue`` writes, where it is there and has as many labels as the head."""
    numbered = [f"LABEL_{number}" for number in range(num_classes)]
    path = Path(str(pretrained.task.get("data", ""))) / TASK_FILE
    if not path.is_file():
        return numbered
    try:
        labels = json.loads(path.read_text(encoding="utf-8")).get("labels") or []
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} does not name the labels of the task: give them with --labels A,B,...") from error
    return labels if len(labels) == num_classes else numbered
