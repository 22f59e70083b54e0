"""The GLUE tasks: scores, the metric that fairseq selects checkpoints by, and the number of rows of the official files."""

from dataclasses import dataclass

from amos_fairseq.errors import UserError


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Attributes:
        main_score: AMOS Table 1: Spearman correlation for STS-B, Matthews correlation for CoLA, accuracy for the others.
        fairseq_metric: the name of that score in fairseq's ``sentence_prediction`` criterion.
        report_flag: the flag of the criterion that enables it; empty for accuracy, which is always computed.
        dev_splits: split -> suffix of its scores ("" and "_mm" for MNLI's matched and mismatched sets).
        test_files: split -> name of the leaderboard's file.
        official_rows: split -> number of rows of the official file.
    """

    name: str
    main_score: str
    fairseq_metric: str
    report_flag: str
    dev_splits: dict[str, str]
    test_files: dict[str, str]
    official_rows: dict[str, int]
    with_f1: bool = False


def _task(
    name: str, train: int, dev: int, test: int, score: str = "accuracy", metric: str = "accuracy", flag: str = "",
    with_f1: bool = False,
) -> GlueTask:  # fmt: skip
    rows = {"train": train, "valid": dev, "test": test}
    return GlueTask(name, score, metric, flag, {"valid": ""}, {"test": f"{name}.tsv"}, rows, with_f1)


# Order and scores: AMOS Table 1. Rows: the official files, according to Hugging Face's card of the data set nyu-mll/glue and
# the task descriptions (AMOS Table 2, in thousands).
_MNLI = GlueTask(
    "MNLI", "accuracy", "accuracy", "", {"valid": "", "valid1": "_mm"}, {"test": "MNLI-m.tsv", "test1": "MNLI-mm.tsv"},
    {"train": 392_702, "valid": 9_815, "valid1": 9_832, "test": 9_796, "test1": 9_847},
)  # fmt: skip
TASKS = {
    task.name: task
    for task in (
        _MNLI,
        _task("QQP", 363_846, 40_430, 390_965, with_f1=True),
        _task("QNLI", 104_743, 5_463, 5_463),
        _task("SST-2", 67_349, 872, 1_821),
        _task("CoLA", 8_551, 1_043, 1_063, "matthews", "mcc", "--report-mcc"),
        _task("RTE", 2_490, 277, 3_000),
        _task("MRPC", 3_668, 408, 1_725, with_f1=True),
        _task("STS-B", 5_749, 1_500, 1_379, "spearman", "spearman", "--report-pearson-and-spearman"),
        _task("WNLI", 635, 71, 146),
    )
}
# The eight tasks of the average: all three papers leave WNLI out.
AVERAGED = tuple(name for name in TASKS if name != "WNLI")
# The diagnostic set has no training data; the model of MNLI predicts it.
DIAGNOSTIC = "AX"
DIAGNOSTIC_ROWS = 1_104
# AMOS Appendix E: small tasks start "from checkpoints that are fine-tuned on MNLI"; thesis 5.2.4 names RTE and STS.
INTERMEDIATE_TASK = "MNLI"
INTERMEDIATE_FOR = ("RTE", "STS-B", "MRPC")


def parse_tasks(text: str) -> list[str]:
    """Parse a list of tasks: "CoLA,rte" -> ["CoLA", "RTE"], without duplicates; "ALL" gives the eight of the average.

    Raises:
        UserError: a name is not the name of a task.
    """
    if text.strip().lower() == "all":
        return list(AVERAGED)
    by_lower_case = {name.lower(): name for name in TASKS}
    chosen: dict[str, None] = {}
    for name in text.split(","):
        if name.strip().lower() not in by_lower_case:
            raise UserError(f"unknown task {name.strip()!r}: choose from {', '.join(TASKS)}, separated by commas")
        chosen[by_lower_case[name.strip().lower()]] = None
    return list(chosen)
