"""``OUT/NAME.json``: every run and what follows from them, for programs; another benchmark's table reads it too."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.plan import read_json, write_json
from amos_fairseq.finetuning.results import Result
from amos_fairseq.finetuning.statistics import TaskSummary

# What another benchmark's table takes from a summary.
_SHOWN = {"setup": dict, "tasks": dict, "notes": list}


def summary_file(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def write_summary(
    out: Path, name: str, setup: dict[str, Any], results: Sequence[Result], tasks: dict[str, TaskSummary],
    notes: Sequence[str], **also: Any,
) -> Path:  # fmt: skip
    """Write the summary of a benchmark.

    Args:
        setup: checkpoint, recipe, precision: what all runs share.
        also: further parts, such as an average.

    Returns:
        The path of the file.
    """
    content = {
        "benchmark": name,
        "setup": setup,
        "tasks": {task: _task(summary) for task, summary in tasks.items()},
        **also,
        "notes": list(notes),
        "runs": [dataclasses.asdict(result) for result in results],
    }
    file = summary_file(out, name)
    write_json(file, content)
    return file


def _task(summary: TaskSummary) -> dict[str, Any]:
    best = summary.best
    return {
        "main_score": best.main_score,
        "scores": {name: spread.as_dict() for name, spread in summary.scores.items()},
        "settings": summary.point,
        "settings_tried": summary.points,
        "best_run": {"directory": best.directory, "seed": best.seed, best.main_score: best.main},
    }


def read_summary(out: Path, name: str, setup: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of another benchmark, to be shown beside one of the same weights; None where there is none.

    Raises:
        UserError: it is of another checkpoint, or one of the two is of random weights; or the file is something else.
    """
    file = summary_file(out, name)
    content = read_json(file)
    if content is None:
        return None
    if not isinstance(content, dict) or any(not isinstance(content.get(part), kind) for part, kind in _SHOWN.items()):
        raise UserError(f"{file} is no summary of amos {name}: repeat that command, which writes it anew")
    for part in ("checkpoint_sha256", "from_scratch"):
        if content["setup"].get(part) != setup[part]:
            raise UserError(
                f"{file} does not belong beside these runs ({part} {content['setup'].get(part)}, not {setup[part]}): "
                f"give the results of the same weights with --{name}"
            )
    return content
