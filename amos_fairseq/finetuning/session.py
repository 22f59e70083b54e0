"""What one call of ``amos glue`` or ``amos squad`` is about: a checkpoint, a recipe, seeds, devices, and the place OUT."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Benchmark, Task
from amos_fairseq.finetuning.plan import Run, claim_out, content_sha256, plan_runs
from amos_fairseq.finetuning.recipes import Recipe, load_recipe
from amos_fairseq.finetuning.results import Result
from amos_fairseq.finetuning.runner import Runner, find_devices
from amos_fairseq.finetuning.starting_point import StartingPoint, read_starting_point
from amos_fairseq.finetuning.statistics import TaskSummary

OVERRIDES = ("lr", "epochs", "batch_size")


@dataclass(frozen=True)
class Session:
    """What was asked for, checked.

    Attributes:
        overrides: settings of the recipe that the command line replaced.
        seeds: of the runs, from 1.
        devices: one run at a time on each.
    """

    start: StartingPoint
    recipe: Recipe
    overrides: dict[str, Any]
    seeds: tuple[int, ...]
    out: Path
    devices: tuple[str, ...]
    precision: str
    keep_checkpoints: bool

    @property
    def setup(self) -> dict[str, Any]:
        """What all results in OUT share, as plain values."""
        points = {task: [settings.as_dict() for settings in own] for task, own in self.recipe.points.items()}
        return {
            "arch": self.start.arch,
            "checkpoint_sha256": self.start.sha256,
            "from_scratch": self.start.from_scratch,
            "overrides": self.overrides,
            "precision": self.precision,
            "recipe": Path(self.recipe.name).name,
            "recipe_sha256": content_sha256(points),
            "size": self.recipe.size,
        }

    def claim(self, benchmark: Benchmark) -> None:
        """Make OUT the place of these settings; raises :class:`UserError` where it holds results of another."""
        claim_out(self.out, benchmark.name, self.setup)

    def plan(self, tasks: Sequence[Task], intermediate: Path | None = None) -> list[Run]:
        """All runs of the tasks.

        Args:
            intermediate: checkpoint to start from instead of the session's.
        """
        start = None if self.start.from_scratch else self.start.file
        origin = {name: self.setup[name] for name in ("checkpoint_sha256", "from_scratch", "precision")}
        if intermediate is not None:
            start, origin = intermediate, origin | {"intermediate_sha256": file_sha256(intermediate)}
        return plan_runs(tasks, self.recipe, self.seeds, self.out, start, origin)

    def runner(self, benchmark: Benchmark) -> Runner:
        return Runner(
            benchmark, self.start, self.out, self.devices, self.precision, keep_checkpoints=self.keep_checkpoints
        )

    @property
    def row_name(self) -> str:
        """Name of our row in a table."""
        weights = "random weights" if self.start.from_scratch else f"{self.start.num_updates:,} updates"
        return f"{self.start.arch} ({weights})"


def open_session(
    checkpoint: str, out: str, recipe: str, size: str | None = None, num_seeds: int = 5, from_scratch: bool = False,
    overrides: dict[str, Any] | None = None, cpu: bool = False, parallel: int = 1, precision: str = "fp32",
    keep_checkpoints: bool = False,
) -> Session:  # fmt: skip
    """Check what the user gave and read the checkpoint's header; nothing is written.

    Args:
        size: which of the recipe's sizes; by default the one of the encoder's width.
        overrides: settings that replace the recipe's for every task; None values are left out.

    Raises:
        UserError: anything of it cannot be used.
    """
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} makes no run: give 1 or more")
    devices = find_devices(cpu, parallel)
    if precision != "fp32" and devices[0] == "cpu":
        raise UserError(f"--{precision} needs a GPU: leave it out to fine-tune in float32")
    if precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise UserError("--bf16: this GPU has no bfloat16; give --fp16")
    start = read_starting_point(checkpoint, from_scratch)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name, value in given.items():
        if not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value} must be above 0")
    chosen = load_recipe(recipe, size or start.size, given)
    seeds = tuple(range(1, num_seeds + 1))
    return Session(start, chosen, given, seeds, Path(out).resolve(), devices, precision, keep_checkpoints)


def session_notes(session: Session, results: Sequence[Result], summaries: dict[str, TaskSummary]) -> Iterator[str]:
    """Footnotes of a table: recipe, seeds, choices by dev score, the data."""
    changed = "".join(f", {name} {value:g} instead" for name, value in session.overrides.items())
    yield f"recipe {session.setup['recipe']} ({session.recipe.description}; size {session.recipe.size}{changed})"
    counts = {task: summary.main.count for task, summary in summaries.items()}
    same = len(set(counts.values())) == 1
    listed = f"{next(iter(counts.values()))} a task" if same else ", ".join(f"{t} {n}" for t, n in counts.items())
    yield f"seeds: {listed}; standard deviations divide by n - 1"
    if session.start.from_scratch:
        yield "random weights: the architecture of the checkpoint, nothing of its pretraining"
    for task, summary in summaries.items():
        if summary.points > 1:
            yield f"{task}: {summary.point}, the highest median of {summary.points} combinations on the dev set itself"
    if any(session.recipe.points[task][0].checkpoint == "best" for task in summaries if task in session.recipe.points):
        yield "each run is scored at the epoch that is best on the same dev set"
    yield from dict.fromkeys(note for result in results for note in result.notes)
