"""The ten GLUE tasks: their files in the official download, their columns, and the order of their labels."""

from dataclasses import dataclass
from typing import Dict, List, Tuple

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.glue.tasks import TASKS as SCORED_TASKS

# Names of the splits as fairseq writes them. MNLI has two development and two test sets: matched, then mismatched.
_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
_MNLI_FILES = {
    "train": "train.tsv",
    "valid": "dev_matched.tsv",
    "valid1": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test1": "test_mismatched.tsv",
}
# GLUE's download script writes diagnostic/diagnostic.tsv; the file on the server is AX.tsv.
_AX_PLACES = ("diagnostic/diagnostic.tsv", "AX/diagnostic.tsv", "AX/AX.tsv", "AX/test.tsv", "AX.tsv")
LARGEST_SCORE = 5.0
# From Hugging Face's dataset_infos.json. The other tasks' numbers are with their metrics; AX is not scored here.
_AX_ROWS = {"test": 1104}


@dataclass(frozen=True)
class GlueTask:
    """``labels``: in the order of the classes, as on the leaderboard; empty for a regression (0 to 5).

    ``texts`` and ``label``: column names in the header; ``headerless``: the columns of files without a header (all
    but the test file). ``files``: possible paths of each split, relative to the download.
    """

    name: str
    texts: Tuple[str, ...]
    label: str
    labels: Tuple[str, ...]
    files: Dict[str, Tuple[str, ...]]
    headerless: Tuple[str, ...] = ()

    @property
    def official_rows(self) -> Dict[str, int]:
        """Number of rows of each split of the official files, without broken lines; published scores refer to them."""
        return _AX_ROWS if self.name == "AX" else SCORED_TASKS[self.name].official_rows

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def num_classes(self) -> int:
        """Value of ``--num-classes``: 1 for a regression."""
        return len(self.labels) or 1

    def columns_without_header(self, split: str) -> Tuple[str, ...]:
        """Return the columns of a split whose file has no header; empty if it has one."""
        return () if is_test(split) else self.headerless


def is_test(split: str) -> bool:
    """Return whether the split is a test set, which has no labels and may be missing."""
    return split.startswith("test")


def _task(name: str, texts: Tuple[str, ...], label: str, labels: Tuple[str, ...], **other: Tuple[str, ...]) -> GlueTask:
    files = {split: (f"{name}/{file}",) for split, file in (_MNLI_FILES if name == "MNLI" else _FILES).items()}
    return GlueTask(name, texts, label, labels, files, **other)


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("entailment", "neutral", "contradiction")

_ALL = (
    _task("CoLA", ("sentence",), "label", _BINARY, headerless=("source", "label", "mark", "sentence")),
    _task("SST-2", ("sentence",), "label", _BINARY),
    _task("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY),
    _task("STS-B", _PAIR, "score", ()),
    _task("QQP", ("question1", "question2"), "is_duplicate", _BINARY),
    _task("MNLI", _PAIR, "gold_label", _INFERENCE),
    _task("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
    _task("RTE", _PAIR, "label", _ENTAILMENT),
    _task("WNLI", _PAIR, "label", _BINARY),
    GlueTask("AX", _PAIR, "label", _INFERENCE, {"test": _AX_PLACES}),
)
TASKS: Dict[str, GlueTask] = {task.name: task for task in _ALL}


def parse_tasks(text: str) -> List[GlueTask]:
    """Parse ``"CoLA"``, ``"CoLA,RTE"`` or ``"ALL"``, ignoring case. Each task once, in the given order.

    Raises:
        UserError: a name is unknown.
    """
    if text.upper() == "ALL":
        return list(TASKS.values())
    by_lower_case = {name.lower(): task for name, task in TASKS.items()}
    chosen: Dict[str, GlueTask] = {}
    for name in text.split(","):
        task = by_lower_case.get(name.strip().lower())
        if task is None:
            raise UserError(f"unknown task {name.strip()!r}: choose ALL or, separated by commas, {', '.join(TASKS)}")
        chosen[task.name] = task
    return list(chosen.values())
