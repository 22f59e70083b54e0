"""Which runs there are to make: tasks x hyperparameters x seeds, each in a directory of its own that knows what it is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.finetuning.benchmark import Task
from amos_fairseq.finetuning.recipes import Recipe
from amos_fairseq.finetuning.settings import Settings

IDENTITY_FILE = "run.json"


@dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Attributes:
        point: names the combination of hyperparameters where a recipe has several; empty otherwise.
        start: checkpoint whose encoder is taken; None for random weights.
        identity: everything that decides the outcome, as plain values; equal identities are the same run.
    """

    task: Task
    settings: Settings
    point: str
    seed: int
    start: Path | None
    directory: Path
    identity: dict[str, Any]

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.task.name, self.point, f"seed {self.seed}") if part)


def plan_runs(
    tasks: Sequence[Task], recipe: Recipe, seeds: Sequence[int], out: Path, start: Path | None, origin: dict[str, Any]
) -> list[Run]:
    """Every run of the tasks, seeds inside combinations inside tasks: the first result of each task comes early.

    Args:
        start: checkpoint for all of them; None for random weights.
        origin: what else decides the outcome: checkpoint, precision, intermediate task.
    """
    runs = []
    for task in tasks:
        points = recipe.of(task.name)
        for settings in points:
            point = point_name(settings, points)
            for seed in seeds:
                identity = origin | {
                    "task": task.name, "seed": seed, "settings": settings.as_dict(), "data_sha256": task.data_sha256,
                    "rows": task.rows,
                }  # fmt: skip
                directory = out / "runs" / task.name / point / f"seed{seed}"
                runs.append(Run(task, settings, point, seed, start, directory, identity))
    return runs


def point_name(settings: Settings, points: Sequence[Settings]) -> str:
    """Name of a combination by the settings in which the combinations differ: ``epochs3-lr2e-05``."""
    own, others = settings.as_dict(), [point.as_dict() for point in points]
    return "-".join(f"{name}{value}" for name, value in own.items() if any(o[name] != value for o in others))


def check_identity(run: Run) -> None:
    """Raise :class:`UserError` where the run's directory holds another run."""
    file = run.directory / IDENTITY_FILE
    found = read_json(file)
    if found is not None and found != run.identity:
        difference = _first_difference(found, run.identity)
        raise UserError(
            f"{run.directory} holds another run ({difference}): give another --out, or delete that directory"
        )


def _first_difference(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> str:
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name), here.get(name)
        if one != other and isinstance(one, dict) and isinstance(other, dict):
            return _first_difference(one, other, f"{name} ")
        if one != other:
            return f"{prefix}{name} {_short(one)}, not {_short(other)}"
    return "nothing differs"


def _short(value: Any) -> str:
    """A sha256 is known by its beginning."""
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def claim_directory(run: Run) -> None:
    """Make the run's directory and write down which run it is."""
    check_identity(run)
    run.directory.mkdir(parents=True, exist_ok=True)
    write_json(run.directory / IDENTITY_FILE, run.identity)


def claim_out(out: Path, name: str, setup: dict[str, Any]) -> None:
    """Make OUT, or check that it belongs to the same checkpoint and recipe: one table shows one of each.

    Raises:
        UserError: OUT holds results of others, or cannot be written.
    """
    file = out / f"{name}.setup.json"
    found = read_json(file)
    if found is not None and found != setup:
        raise UserError(f"{out} holds results of another {_first_difference(found, setup)}: give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, setup)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): give another --out") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """The content; None where there is no file. Raises :class:`UserError` where it is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): delete it to make it anew") from error


def write_json(file: Path, content: Any) -> None:
    with whole_file(str(file)) as unfinished:
        Path(unfinished).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def content_sha256(content: Any) -> str:
    """Fingerprint of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
