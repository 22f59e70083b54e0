"""The ten GLUE tasks: files of the official download, columns, order of the labels, scores, and files of the leaderboard."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.files import COMPRESSIONS
from amos_fairseq.output.terminal import say

LARGEST_SCORE = 5.0  # of STS-B, the one regression
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


@dataclass(frozen=True)
class GlueTask:
    name: str
    texts: tuple[str, ...]  # columns
    label: str  # column
    labels: tuple[str, ...]  # in the order of the classes, as on the leaderboard; empty for a regression (0 to 5)
    official_rows: dict[str, int]  # of each split without broken lines; published scores refer to them
    scores: tuple[str, ...] = ("accuracy",)  # the first is the main one, as in AMOS Table 1

    @property
    def main_score(self) -> str:
        return self.scores[0]

    @property
    def head(self) -> str:
        """The task whose model predicts this one: that of MNLI also the diagnostic set, which has no training data."""
        return "MNLI" if self.name == DIAGNOSTIC else self.name

    @staticmethod
    def suffix(split: str) -> str:
        """Return what the names of a split's scores end with: ``_mm`` for MNLI's mismatched set."""
        return "_mm" if split == "valid1" else ""

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """Possible paths of each split, relative to the download."""
        if self.name == DIAGNOSTIC:
            return {"test": _AX_PLACES}
        names = _MNLI_FILES if self.name == "MNLI" else _FILES
        return {split: (f"{self.name}/{name}",) for split, name in names.items()}

    @property
    def test_files(self) -> dict[str, str]:
        """Split -> name of the leaderboard's file."""
        tests = [split for split in self.files if is_test(split)]
        names = ("-m", "-mm") if len(tests) > 1 else ("",)
        return {split: f"{self.name}{suffix}.tsv" for split, suffix in zip(tests, names, strict=True)}

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def has_header(self, split: str) -> bool:
        """Return whether the first line of a split names the columns; only CoLA's labeled files have source, label, mark,
        sentence without such a line."""
        return self.name != "CoLA" or is_test(split)


def is_test(split: str) -> bool:
    """Return whether the split is a test set, which has no labels and may be missing."""
    return split.startswith("test")


def _rows(train: int, valid: int, test: int) -> dict[str, int]:
    return {"train": train, "valid": valid, "test": test}


DIAGNOSTIC = "AX"
_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_WITH_F1 = ("accuracy", "f1")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("entailment", "neutral", "contradiction")
_MNLI_ROWS = {"train": 392_702, "valid": 9_815, "valid1": 9_832, "test": 9_796, "test1": 9_847}

# Rows: the official files, according to Hugging Face's card and dataset_infos.json of the data set nyu-mll/glue and the task
# descriptions (AMOS Table 2, in thousands).
_ALL = (
    GlueTask("CoLA", ("sentence",), "label", _BINARY, _rows(8_551, 1_043, 1_063), ("matthews", "accuracy")),
    GlueTask("SST-2", ("sentence",), "label", _BINARY, _rows(67_349, 872, 1_821)),
    GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, _rows(3_668, 408, 1_725), _WITH_F1),
    GlueTask("STS-B", _PAIR, "score", (), _rows(5_749, 1_500, 1_379), ("spearman", "pearson")),
    GlueTask("QQP", ("question1", "question2"), "is_duplicate", _BINARY, _rows(363_846, 40_430, 390_965), _WITH_F1),
    GlueTask("MNLI", _PAIR, "gold_label", _INFERENCE, _MNLI_ROWS),
    GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, _rows(104_743, 5_463, 5_463)),
    GlueTask("RTE", _PAIR, "label", _ENTAILMENT, _rows(2_490, 277, 3_000)),
    GlueTask("WNLI", _PAIR, "label", _BINARY, _rows(635, 71, 146)),
    GlueTask(DIAGNOSTIC, _PAIR, "label", _INFERENCE, {"test": 1_104}),
)
TASKS = {task.name: task for task in _ALL}
# Those with a development set, in the order of AMOS Table 1; all three papers leave WNLI out of the average.
AVERAGED = ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B")
SCORED = (*AVERAGED, "WNLI")


def parse_tasks(text: str, known: Iterable[str] = SCORED, everything: Iterable[str] = AVERAGED) -> list[str]:
    """Parse a list of tasks: "CoLA,rte" -> ["CoLA", "RTE"], without duplicates; "ALL" gives ``everything``."""
    if text.strip().lower() == "all":
        return list(everything)
    by_lower_case = {name.lower(): name for name in known}
    chosen: dict[str, None] = {}
    for name in text.split(","):
        if name.strip().lower() not in by_lower_case:
            choices = ", ".join(by_lower_case.values())
            raise UserError(f"unknown task {name.strip()!r}: choose ALL or, separated by commas, {choices}")
        chosen[by_lower_case[name.strip().lower()]] = None
    return list(chosen)


def tasks_in(
    folder: Path, text: str, known: Iterable[str], everything: Iterable[str], is_there: Callable[[str], bool], done: str
) -> list[str]:
    """Parse a list of tasks as ``parse_tasks``. ``ALL`` leaves out those that are not in ``folder``, with a line that says
    that they are not ``done``; without any, all are returned, and the first one is reported as missing."""
    tasks = parse_tasks(text, known, everything)
    if text.strip().lower() != "all" or not any(map(is_there, tasks)):
        return tasks
    if missing := [task for task in tasks if not is_there(task)]:
        say(f"not in {folder}, so not {done}: {', '.join(missing)}", "glue")
    return [task for task in tasks if task not in missing]


def has_any_file(directory: Path, task: GlueTask) -> bool:
    """Return whether a folder of official files has one of the task."""
    return any(_candidates(directory, places) for places in task.files.values())


def find_files(directory: Path, task: GlueTask) -> dict[str, Path]:
    """Return the official file of each split, plain or compressed. A test file may be missing unless it is the only one."""
    files = {}
    for split, places in task.files.items():
        paths = _candidates(directory, places)
        if len(paths) > 1:
            say(f"{paths[0]} is read, and not {paths[1]}, which is the same part of {task.name}", "glue")
        if paths:
            files[split] = paths[0]
        elif not is_test(split) or task.name == DIAGNOSTIC:
            missing = f"{directory / places[0]}: no such file (nor as {', '.join(COMPRESSIONS)})"
            raise UserError(f"{missing}: copy it there; docs/glue.md says where {task.name} is downloaded")
    return files


def _candidates(directory: Path, places: tuple[str, ...]) -> list[Path]:
    paths = [directory / f"{place}{compression}" for place in places for compression in ("", *COMPRESSIONS)]
    return [path for path in paths if path.is_file()]
