"""One call of ``amos glue`` or ``amos squad``: the checked arguments, the runs they ask for, and the outcome."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Benchmark, Task
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint, read_pretrained_checkpoint
from amos_fairseq.finetuning.recipes import Recipe, load_recipe
from amos_fairseq.finetuning.report import TaskSummary
from amos_fairseq.finetuning.runner import Failure, Runner, find_devices
from amos_fairseq.finetuning.runs import Result, Run, content_sha256, plan_runs, write_json
from amos_fairseq.fingerprint import file_sha256
from amos_fairseq.tables import Table

MOST_SEEDS = 10_000

OVERRIDES = ("lr", "epochs", "batch_size", "num_separators")


@dataclass(frozen=True)
class Session:
    """The checked arguments of the command.

    Attributes:
        overrides: values from the command line that replace the recipe's for every task.
        devices: one run at a time on each.
    """

    checkpoint: PretrainedCheckpoint
    recipe: Recipe
    overrides: dict[str, Any]
    seeds: tuple[int, ...]
    out: Path
    devices: tuple[str, ...]
    precision: str
    keep_checkpoints: bool

    @property
    def setup(self) -> dict[str, Any]:
        """The settings that all results in OUT share, as plain values."""
        trials = {task: [trial.as_dict() for trial in own] for task, own in self.recipe.trials.items()}
        return {
            "arch": self.checkpoint.arch,
            "checkpoint_sha256": self.checkpoint.sha256,
            "from_scratch": self.checkpoint.from_scratch,
            "overrides": self.overrides,
            "precision": self.precision,
            "recipe": Path(self.recipe.name).name,
            "recipe_sha256": content_sha256(trials),
            "size": self.recipe.size,
        }

    @property
    def row_name(self) -> str:
        """Name of the checkpoint's row in a table."""
        weights = "random weights" if self.checkpoint.from_scratch else f"{self.checkpoint.num_updates:,} updates"
        return f"{self.checkpoint.arch} ({weights})"

    def plan(self, tasks: Sequence[Task], intermediate: Path | None = None) -> list[Run]:
        """Return all runs of the tasks.

        Args:
            intermediate: checkpoint to start from instead of the session's.
        """
        finetune_from = None if self.checkpoint.from_scratch else self.checkpoint.file
        origin = {name: self.setup[name] for name in ("checkpoint_sha256", "from_scratch", "precision")}
        if intermediate is not None:
            finetune_from, origin = intermediate, origin | {"intermediate_sha256": file_sha256(intermediate)}
        return plan_runs(tasks, self.recipe, self.seeds, self.out, finetune_from, origin)

    def runner(self, benchmark: Benchmark) -> Runner:
        return Runner(
            benchmark, self.checkpoint, self.out, self.devices, self.precision, keep_checkpoints=self.keep_checkpoints
        )


def open_session(
    checkpoint: str, out: str, recipe: str, size: str | None = None, num_seeds: int = 5, from_scratch: bool = False,
    overrides: dict[str, Any] | None = None, cpu: bool = False, parallel: int = 1, precision: str = "fp32",
    keep_checkpoints: bool = False,
) -> Session:  # fmt: skip
    """Check the arguments and read the checkpoint's header. Nothing is written.

    Args:
        size: size of the recipe; by default that of the encoder's width.
        overrides: values that replace the recipe's for every task; None values are ignored.

    Raises:
        UserError: an argument cannot be used.
    """
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} asks for no run: give 1 or more")
    if num_seeds > MOST_SEEDS:
        raise UserError(f"--seeds {num_seeds} asks for too many runs: give at most {MOST_SEEDS:,}")
    devices = find_devices(cpu, parallel)
    if precision != "fp32" and devices[0] == "cpu":
        raise UserError(f"--{precision} needs a GPU: omit it to fine-tune in float32")
    if precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise UserError("--bf16: this GPU does not support bfloat16; give --fp16")
    pretrained = read_pretrained_checkpoint(checkpoint, from_scratch)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name, value in given.items():
        if not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value} must be above 0")
    chosen = load_recipe(recipe, size or pretrained.size, given)
    seeds = tuple(range(1, num_seeds + 1))
    return Session(pretrained, chosen, given, seeds, Path(out).resolve(), devices, precision, keep_checkpoints)


@dataclass(frozen=True)
class Outcome:
    """The outcome of the command.

    Attributes:
        table: None if no run has a result.
        notices: messages for the user about these files.
    """

    table: Table | None
    failures: list[Failure]
    files: list[Path]
    notices: Sequence[str] = ()


def session_notes(session: Session, results: Sequence[Result], summaries: dict[str, TaskSummary]) -> Iterator[str]:
    """Yield the footnotes of a table: recipe, seeds, selection by dev score, data.

    ``summaries``: by the names of the tasks that the table shows.
    """
    changed = "".join(f", {name} {value:g} instead" for name, value in session.overrides.items())
    yield f"recipe {session.setup['recipe']} ({session.recipe.description}; size {session.recipe.size}{changed})"
    counts = {task: summary.main.count for task, summary in summaries.items()}
    same = len(set(counts.values())) == 1
    listed = f"{next(iter(counts.values()))} per task" if same else ", ".join(f"{t} {n}" for t, n in counts.items())
    yield f"seeds: {listed}; standard deviations divide by n - 1"
    if session.checkpoint.from_scratch:
        yield "random weights: only the architecture of the checkpoint, none of its weights"
    for task, summary in summaries.items():
        if summary.num_trials > 1:
            yield (
                f"{task}: {summary.trial}, selected from {summary.num_trials} combinations by the highest median on the "
                "same dev set"
            )
    trials = [session.recipe.trials.get(summary.task) for summary in summaries.values()]
    if any(own[0].checkpoint == "best" for own in trials if own):
        yield "each run is scored at its best epoch on the same dev set"
    yield from dict.fromkeys(note for result in results for note in result.notes)


def save_results(
    session: Session, name: str, setup: dict[str, Any], table: Table, results: Sequence[Result],
    summaries: dict[str, TaskSummary], **extra: Any,
) -> list[Path]:  # fmt: skip
    """Write ``NAME.md``, ``NAME.csv`` and ``NAME.json`` into OUT and return their paths.

    ``extra``: further parts of the summary ``NAME.json``.
    """
    summary = {
        "benchmark": name,
        "setup": setup,
        "tasks": {task: summary.as_dict() for task, summary in summaries.items()},
        "checkpoint": {"file": str(session.checkpoint.file), "num_updates": session.checkpoint.num_updates},
        **extra,
        "notes": list(table.notes),
        "runs": [result.as_dict() for result in results],
    }
    write_json(session.out / f"{name}.json", summary)
    return [*table.save(session.out / name), session.out / f"{name}.json"]
