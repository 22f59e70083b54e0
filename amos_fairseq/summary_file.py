"""The file ``OUT/NAME.json`` of ``amos glue``, ``amos squad`` or ``amos tag``: its format, and how to read it.

It is one JSON object, written by :func:`amos_fairseq.downstream.run_benchmark.save_results`::

    {"benchmark": "glue", "setup": {"checkpoint_sha256": ..., "from_scratch": false, ...},
     "tasks": {"RTE": {"main_score": "accuracy", "scores": {"accuracy": {"median": 70.5, "deviation": 1.2, "count": 3}}}},
     "checkpoint": {"file": ..., "num_updates": ...}, "notes": [...],
     "runs": [{"task": "RTE", "point": "", "seed": 1, "main_score": "accuracy", "scores": {"accuracy": 70.5}}, ...]}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import finite_number, plain_name, whole_number

SCORE_RANGE = (-100, 100)  # percent; a correlation can be negative


@dataclass(frozen=True)
class Spread:
    """Median and standard deviation of one score over seeds.

    Attributes:
        median: as AMOS reports (section 4, "the median of five random seeds").
        deviation: sample standard deviation (divided by n - 1), which estimates the variation between seeds; the paper
            does not state which of the two it prints. None for a single seed.
        count: number of seeds.
    """

    median: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Summary:
    """The results of a benchmark.

    Attributes:
        benchmark: glue, squad or tagging.
        setup: settings that all runs share.
        main_scores: name of the main score by task.
        spreads: of every score, by task and name.
        seeds: the main score of each run in percent, by task and, for a grid, its combination of hyperparameters.
        checkpoint: the fine-tuned checkpoint, as its path was when the benchmark ran.
        from_scratch: whether its weights were replaced by random ones.
    """

    file: Path
    benchmark: str
    setup: dict[str, Any]
    main_scores: dict[str, str]
    spreads: dict[str, dict[str, Spread]]
    seeds: dict[str, list[float]]
    checkpoint: Path
    num_updates: int
    notes: list[str]

    @property
    def from_scratch(self) -> bool:
        return bool(self.setup["from_scratch"])

    @property
    def folder_name(self) -> str:
        return self.file.absolute().parent.name


def parse_summary(file: Path, content: dict[str, Any], complaint: str) -> Summary:
    """Return the content of a summary; ``complaint`` ends the message where it is something else.

    Raises:
        UserError: a part is missing or damaged.
    """
    try:
        tasks = {plain_name(name): task for name, task in content["tasks"].items()}
        checkpoint, setup = content["checkpoint"], dict(content["setup"])
        setup["from_scratch"] = bool(setup["from_scratch"])
        seeds: dict[str, list[float]] = {}
        for run in content["runs"]:
            name = plain_name(f"{run['task']} {run['point']}".strip())
            seeds.setdefault(name, []).append(finite_number(run["scores"][run["main_score"]], *SCORE_RANGE))
        return Summary(
            file,
            plain_name(content["benchmark"]),
            setup,
            {name: plain_name(task["main_score"]) for name, task in tasks.items()},
            {name: _spreads(task) for name, task in tasks.items()},
            seeds,
            Path(plain_name(checkpoint["file"], longest=4096)),
            whole_number(checkpoint["num_updates"]),
            [plain_name(note, longest=10_000) for note in content["notes"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} {complaint}") from error


def _spreads(task: dict[str, Any]) -> dict[str, Spread]:
    in_percent, spreads = (task["main_score"], f"{task['main_score']}_mm"), {}
    for name, own in task["scores"].items():
        limits = (SCORE_RANGE, (0, 200)) if name in in_percent else ((), ())
        deviation = None if own["deviation"] is None else finite_number(own["deviation"], *limits[1])
        spreads[plain_name(name)] = Spread(
            finite_number(own["median"], *limits[0]), deviation, whole_number(own["count"])
        )
    return spreads
