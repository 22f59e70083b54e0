"""A fine-tuning command: the session that all its runs share (pretrained checkpoint, recipe, seeds, devices), its tasks and
runs, and what a task gives for training, scoring and the table."""

import argparse
import contextlib
import dataclasses
import functools
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from yaml import YAMLError

from amos_fairseq.checkpoint_files import checkpoint_file
from amos_fairseq.checkpoints.read import import_source, origin_of, parent_of, read_state, read_tokenizer
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import recipe_names
from amos_fairseq.experiments.recipes import Hyperparameters, Recipe, Schedule, load_recipe, size_for_width
from amos_fairseq.experiments.records import (
    LINEAR,
    NO_CONSTANTS,
    ConstantScores,
    RunResult,
    Summaries,
    TaskSummary,
    content_sha256,
    format_spread,
    summarize,
)
from amos_fairseq.files import TOKENIZER_DIRECTORY, file_sha256
from amos_fairseq.models.configuration import OF_PROCESS, EncoderConfig
from amos_fairseq.models.electric import NO_ENCODER
from amos_fairseq.modules.heads import LINEAR_HEAD
from amos_fairseq.output.terminal import Table, ending_in_one_line, say
from amos_fairseq.run.precision import Device, choose, gpus_support_bf16, supports_bf16
from amos_fairseq.setting_checks import as_flags, model_settings
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

IDENTITY_DIGITS = 8
# Values that replace those of the built-in recipes, which are for BERT's encoder. ModernBERT is trained without attention
# dropout, which attention to packed texts on a GPU does not have.
OF_ENCODER = {"modernbert": {"attention_dropout": 0.0}}
# Values for the head alone: the others would leave it near its random start.
OF_HEAD = {"lr": 1e-3, "layer_wise_lr_decay": 1.0}
# Settings of single objectives that decide which encoder of a checkpoint is fine-tuned.
BRANCH_FIELDS = {"representation", "task_heads", "mws_loss_weight", "rtd_loss_weight"}
OF_RECIPE = {"dropout", "attention_dropout", "pooler_dropout", "pooling"}
MODEL_FIELDS = ({field.name for field in dataclasses.fields(EncoderConfig)} | BRANCH_FIELDS) - OF_PROCESS - OF_RECIPE
# Hyperparameters with a flag of their own; --set has all.
FLAGS = ("lr", "epochs", "batch_size", "min_updates", "pooling", "freeze_encoder", "views")


@dataclass(frozen=True)
class PretrainedCheckpoint:
    """The checkpoint that fine-tuning starts from, without its weights."""

    file: Path
    sha256: str
    arch: str
    model: dict[str, Any]  # settings of the encoder, without those that the recipe provides
    task_state: dict[str, Any]  # the stored hashes of tokenizer and dictionary
    num_updates: int
    from_scratch: bool = False  # runs start from random weights, with nothing but the architecture
    pooling: str = "first"  # of a folder that says how its states are pooled, or of the training before
    source: str = ""  # where imported weights come from, and how they were trained further; empty if none were imported

    @property
    def max_positions(self) -> int:
        return int(self.model["max_positions"])

    def model_flags(self) -> list[str]:
        """Return ``--arch`` and every setting of the encoder as flags, so that the model gets the checkpoint's shapes."""
        return ["--arch", self.arch, *as_flags(self.model)]

    def check_tokenizer(self, directory: Path) -> None:
        """Refuse a ``directory`` without the tokenizer that the checkpoint was trained with."""
        try:
            read_tokenizer(self.file, directory, self.task_state)
        except UserError as error:
            raise UserError(f"the data do not fit the checkpoint: {error}, and prepare them with it") from error


def read_pretrained_checkpoint(checkpoint: str | Path, from_scratch: bool = False) -> PretrainedCheckpoint:
    """Read the header and the sha256 of a checkpoint, or of the ``checkpoint_last.pt`` of a SAVE_DIR, without its weights."""
    file = checkpoint_file(Path(checkpoint)).resolve()
    header = read_state(file)
    settings = OmegaConf.to_container(model_settings(file, header["cfg"]["model"]), enum_to_str=True)
    if settings.get("electric_variant") == "two_tower":
        raise UserError(f"{file}: {NO_ENCODER}")
    model = {name: settings[name] for name in sorted(MODEL_FIELDS & settings.keys())}
    # The recipe of this fine-tuning says what the head is, not that of an earlier one.
    if model.get("pooler_activation_fn") == LINEAR_HEAD:
        del model["pooler_activation_fn"]
    num_updates = int(header["optimizer_history"][-1]["num_updates"])
    start = import_source(header["cfg"]["task"]) or os.path.isfile(parent_of(header["cfg"]))
    source = origin_of(str(file)) if start else ""
    sha256, arch = file_sha256(file), settings["_name"]
    more = {"pooling": settings["pooling"], "source": source}
    return PretrainedCheckpoint(file, sha256, arch, model, header["task_state"], num_updates, from_scratch, **more)


@dataclass(frozen=True)
class Session:
    """The checked arguments of the command. Each of the ``devices``, "cpu" or "cuda:N", executes one run at a time."""

    checkpoint: PretrainedCheckpoint
    recipe: Recipe
    overrides: dict[str, Any]
    seeds: tuple[int, ...]
    out: Path
    devices: tuple[str, ...]
    precision: str
    keep_checkpoints: bool

    @property
    def row_name(self) -> str:
        start = self.checkpoint
        if start.source and not start.from_scratch:
            return start.source
        weights = "random weights" if start.from_scratch else f"{start.num_updates:,} updates"
        return f"{start.arch} ({weights})"

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Tokenizer]:
        """Yield the checkpoint's tokenizer to prepare data inside of OUT with; Ctrl-C and disk errors end in one line."""
        start = self.checkpoint
        with ending_in_one_line("finished data and runs are kept"):
            yield read_tokenizer(start.file, start.file.parent / TOKENIZER_DIRECTORY, start.task_state)


def session_from(args: argparse.Namespace) -> Session:
    """Read what the arguments of a command name: the checkpoint's header and the recipe. Nothing is written."""
    devices = find_devices(args.cpu, args.parallel)
    precision = choose_precision(args.precision, devices)
    if args.precision == "auto":
        say(f"precision {precision}", args.subcommand)
    start = read_pretrained_checkpoint(args.checkpoint, args.from_scratch)
    overrides = {name: value for name in FLAGS if (value := getattr(args, name, None)) is not None}
    try:
        overrides |= OmegaConf.to_container(OmegaConf.from_dotlist(args.overrides))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"--set {' '.join(args.overrides)}: give NAME=VALUE, such as weight_decay=0.01") from error
    of_checkpoint = {"pooling": start.pooling} if "pooling" in args and start.pooling != "first" else {}
    recipe, overrides = recipe_for(start, args.recipe, overrides, of_checkpoint)
    seeds, out = tuple(range(1, args.seeds + 1)), Path(args.out).resolve()
    if any(os.path.isfile(out / name) for name in ("adapt.yaml", "checkpoint_last.pt")):
        raise UserError(f"--out {out} is that of amos adapt or a SAVE_DIR: give another")
    return Session(start, recipe, overrides, seeds, out, devices, precision, args.keep_checkpoints)


def recipe_for(
    start: PretrainedCheckpoint, name: str, overrides: dict[str, Any], of_checkpoint: dict[str, Any]
) -> tuple[Recipe, dict[str, Any]]:
    """Return a recipe for an encoder, and the values that replace those of the recipe: ``overrides``, those of the checkpoint,
    and what the encoder, or a head alone, needs."""
    if name in recipe_names():  # a user's own recipe may be meant for this encoder
        head_settings = OF_HEAD if overrides.get("freeze_encoder") else {}
        overrides = OF_ENCODER.get(str(start.model["encoder"]), {}) | of_checkpoint | head_settings | overrides
    width = int(start.model["encoder_embed_dim"])
    return load_recipe(name, size_for_width(width), overrides, width), overrides


def choose_precision(asked: str, devices: Sequence[str]) -> str:
    """Return the precision of all runs: "float32", "bf16" or "fp16". The GPUs are asked only where the answer matters: it takes
    seconds."""
    on_gpu, supported = devices[0] != "cpu", True
    if asked in ("auto", "bf16"):
        supported = gpus_support_bf16() if on_gpu else supports_bf16(on_gpu=False)
    device = Device(on_gpu, supported, "the GPUs have no fast bfloat16 products")  # a CPU trains in bf16 without them
    return choose(asked, f"--precision {asked}", device, None)[0]


def find_devices(cpu: bool, parallel: int = 1) -> tuple[str, ...]:
    """Return the GPUs, for one run each; without GPUs or with ``cpu``, the CPU for ``parallel`` runs at a time."""
    if cpu or not torch.cuda.is_available():
        return ("cpu",) * parallel
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


class Stopped(Exception):
    """The user, or a scheduler, asked to stop; the argument is the exit code. Finished runs are kept; the same command
    continues the others."""


class RunFailed(Exception):
    """A run ended without a result. The message is one line."""


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark."""

    name: str
    num_examples: int  # for training; it determines the number of updates
    main_score: str  # selects the best run and is shown in the table
    data_sha256: str  # fingerprint of the prepared data
    trials: tuple[Hyperparameters, ...]  # the combinations of hyperparameters to run: one, or those of a grid
    notes: tuple[str, ...] = ()  # footnotes for the scores, such as a training set that differs from the official one
    # Of several tasks that one model learns: examples that make no whole update at the end of an epoch begin the next one.
    continues_across_epochs: bool = False

    @property
    def scores_best(self) -> bool:
        """Whether the dev set is needed after each epoch."""
        return any(trial.checkpoint == "best" for trial in self.trials)

    @property
    def selection_flags(self) -> list[str]:
        """The flags that select ``checkpoint_best.pt``; without validation where the last checkpoint is scored."""
        if not self.scores_best:
            return ["--disable-validation"]
        return ["--best-checkpoint-metric", self.main_score, "--maximize-best-checkpoint-metric"]


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run: a task, a trial and a seed."""

    task: BenchmarkTask
    hyperparameters: Hyperparameters
    trial: str  # name of the combination of hyperparameters if the task has several; otherwise empty
    seed: int
    finetune_from: Path | None  # checkpoint to start from; None for random weights
    settings: dict[str, Any]  # everything that determines the result but the seed, as plain values
    directory: Path

    @property
    def label(self) -> str:
        return " ".join(word for word in (self.task.name, self.trial, f"seed {self.seed}") if word)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self.hyperparameters.schedule(self.task.num_examples, self.task.continues_across_epochs)


def trial_name(hyperparameters: Hyperparameters, trials: Sequence[Hyperparameters]) -> str:
    """Return the values in which the trials that are trained differ, such as ``epochs3-lr2e-05``; or "linear"."""
    if hyperparameters.linear:
        return LINEAR
    all_values = [trial.as_dict() for trial in trials if not trial.linear]
    return "-".join(
        f"{name}{value}"
        for name, value in hyperparameters.as_dict().items()
        if any(values[name] != value for values in all_values)
    )


@dataclass
class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A subclass must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits independent tasks, one
    row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.json``.
        title, columns: of the default ``table``. A title names the data; :func:`~amos_fairseq.experiments.table.run_benchmark`
            adds what ± means. ``columns``: score -> heading; scores that no task has are left out.
        trained_as: fairseq's task and criterion.
        unit: what the scores count.
        only_trains: prefixes of weights that no prediction needs.
        session: what all runs share.
        data: directory of the prepared data, with ``tokenizer/``.
        tasks: by name. OUT may hold results of several benchmarks, so that names must differ from those of others.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    trained_as: ClassVar[str]
    unit: ClassVar[str] = "rows"
    only_trains: ClassVar[tuple[str, ...]] = ()
    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]

    @abstractmethod
    def train_flags(self, run: TaskRun) -> list[str]:
        """Return the run's arguments of ``fairseq-train``: data directory, those of the task, and the score that selects
        ``checkpoint_best.pt``. The runner adds task, model, optimizer, schedule, seed, device and SAVE_DIR."""

    @abstractmethod
    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions beside it.

        The prediction runs in float32 and without dropout, whatever the precision of the training.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores by name, in percent but for a mean squared error and a threshold, including ``main_score``, as Python floats.
        """

    def fill_directory(self, run: TaskRun) -> None:
        """Copy what loading a checkpoint needs to the run's directory: ``tokenizer/``, and names of labels."""
        hidden = shutil.ignore_patterns(".*")  # no part of a tokenizer
        shutil.copytree(self.data / "tokenizer", run.directory / "tokenizer", dirs_exist_ok=True, ignore=hidden)

    def more_settings(self, task: str, seed: int) -> dict[str, Any]:
        """Return what determines a result besides checkpoint, data and hyperparameters, as plain values."""
        return {}

    def plan(self) -> list[TaskRun]:
        """Return every run of all tasks; seeds vary fastest, then trials."""
        session, runs = self.session, []
        sha256, from_scratch = session.checkpoint.sha256, session.checkpoint.from_scratch
        start = None if from_scratch else session.checkpoint.file
        of_all = {"checkpoint_sha256": sha256, "from_scratch": from_scratch, "precision": session.precision}
        for task in self.tasks.values():
            data = {"task": task.name, "data_sha256": task.data_sha256, "rows": task.num_examples}
            for trial in task.trials:
                for seed in session.seeds[: 1 if trial.linear else None]:  # the fit is deterministic
                    settings = of_all | data | self.more_settings(task.name, seed)
                    settings["hyperparameters"] = trial.as_dict()
                    folder = session.out / "runs" / task.name / content_sha256(settings)[:IDENTITY_DIGITS]
                    name = trial_name(trial, task.trials)
                    runs.append(TaskRun(task, trial, name, seed, start, settings, folder / f"seed{seed}"))
        return runs

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        return results, summarize(results)

    def constants(self) -> dict[str, ConstantScores]:
        """Return the scores of a constant prediction, by the task of a summary."""
        return {}

    def label(self, task: str) -> str:
        return task

    def table(self, summaries: Summaries, constants: Mapping[str, ConstantScores], notes: Sequence[str]) -> Table:
        """Return the table; by default with a row for each task that has results, one for each of its constant predictions, and
        a column for each score."""
        shown = [score for score in self.columns if any(score in summary.scores for summary in summaries.values())]
        rows = []
        for task, summary in sorted(summaries.items()):
            for trial, scores in sorted({summary.trial: summary.scores, **summary.beside}.items()):
                cells = [format_spread(scores.get(score), score) for score in shown]
                what = "linear model on its frozen states" if trial == LINEAR else self.session.row_name
                rows.append([f"{self.label(task)}: {what}", *cells])
            constant = constants.get(task, NO_CONSTANTS)
            rows += [[f"{self.label(task)}: {row}", *constant.cells(row, shown)] for row in constant.scores]
        return Table(self.title, ["", *(self.columns[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterable[str]:
        return ()

    def average(self, summaries: Summaries) -> dict[str, Any] | None:
        """Return name and value of the average of the main scores, where the table has one."""
        return None

    def fit(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, Tensor]:
        """Return the fitted weights of a trial with ``linear``, which only tables of texts have."""
        raise RunFailed(f"{task} has no linear model")

    def calibrated(self, weights: dict[str, Tensor], scores: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the weights that are kept of a run with these ``scores``."""
        return weights

    def details(self, summaries: Summaries, stop: threading.Event) -> Sequence[Table]:
        """Return tables about the best runs, which are shown after the table of all scores."""
        return ()

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def usable_folder(folder: Path) -> Path:
    """Return the absolute path; refuse one that fairseq would take for several."""
    folder = folder.resolve()
    if os.pathsep in str(folder):
        raise UserError(f"{folder}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    return folder
