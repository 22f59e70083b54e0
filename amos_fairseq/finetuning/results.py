"""What a finished run leaves behind: ``result.json`` in its directory."""

import dataclasses
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.plan import read_json, write_json
from amos_fairseq.versions import version_of

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        directory: relative to OUT.
        scores: in percent.
        checkpoint: name of the file that was scored.
        epoch: passes over the training data at the checkpoint that was scored.
        seconds: of training, without evaluation, all parts of an interrupted run together.
        start_sha256: of the checkpoint that it started from; None for random weights.
        identity: what decides the outcome (see plan.py).
        notes: what a reader of the scores must know about the data.
    """

    task: str
    point: str
    seed: int
    directory: str
    main_score: str
    scores: dict[str, float]
    checkpoint: str
    epoch: float
    seconds: float
    start_sha256: str | None
    identity: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> float:
        return self.scores[self.main_score]


def write_result(out: Path, result: Result) -> None:
    write_json(out / result.directory / RESULT_FILE, dataclasses.asdict(result))


def read_result(directory: Path) -> Result | None:
    """The result of a run; None while it is not finished. Raises :class:`UserError` for a damaged file."""
    content = read_json(directory / RESULT_FILE)
    if content is None:
        return None
    try:
        result = Result(**(content | {"notes": tuple(content.get("notes", ()))}))
        float(result.main)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{directory / RESULT_FILE} is no result of a run: delete it to score the run anew") from error
    return result


def read_results(out: Path) -> list[Result]:
    """All finished runs in OUT, by task, combination and seed."""
    files = sorted((out / "runs").glob(f"**/{RESULT_FILE}"))
    results = [result for file in files if (result := read_result(file.parent))]
    return sorted(results, key=lambda result: (result.task, result.point, result.seed))


def versions() -> dict[str, str]:
    """What was run: package names and versions."""
    own = {name: version_of(name) for name in ("amos_fairseq", "fairseq-fixed", "scikit-learn", "scipy")}
    return own | {"python": platform.python_version(), "torch": torch.__version__}
