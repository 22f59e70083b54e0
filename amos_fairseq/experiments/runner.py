"""Run the trainings of a fine-tuning command: what they share, their plan, their execution and its progress.

A run is one ``fairseq-train`` in its own directory and process, followed by one call of ``evaluate`` in a thread of this
process. Several runs are active at once, each on its own device. OUT/runs/TASK/IDENTITY/seedN is named by what determines the
result: finished runs are not repeated, stopped ones continue, and a command with other settings has other directories.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import math
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from amos_fairseq.checkpoint_files import checkpoint_file, read_header, task_state_of, training_seconds_of
from amos_fairseq.checkpoints.read import import_source, parent_of, read_state, read_tokenizer, runs_before
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.errors import INTERRUPTED, REQUEUE, UserError, explain_os_errors
from amos_fairseq.experiments import recipe_names
from amos_fairseq.experiments.recipes import (
    FOR_WORDS,
    Hyperparameters,
    Recipe,
    Schedule,
    check_hyperparameters,
    load_recipe,
    size_for_width,
)
from amos_fairseq.experiments.records import (
    NO_CONSTANTS,
    ConstantScores,
    RunResult,
    Summaries,
    TaskSummary,
    best_run,
    content_sha256,
    format_spread,
    in_order,
    package_versions,
    read_result,
    summarize,
    write_result,
)
from amos_fairseq.files import TOKENIZER_DIRECTORY, explain_write_errors, file_sha256, whole_file
from amos_fairseq.models.configuration import OF_PROCESS, EncoderConfig, check_new_top_layers, parse_layers
from amos_fairseq.models.electric import NO_ENCODER
from amos_fairseq.modules.heads import LINEAR_HEAD
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import ending_in_one_line, progress_bar, say
from amos_fairseq.python_process import SECONDS_TO_SAVE, ForkedCommand
from amos_fairseq.recipes import PACKAGE
from amos_fairseq.run.metrics_file import NewRecords
from amos_fairseq.run.precision import Device, choose, gpus_support_bf16, supports_bf16
from amos_fairseq.setting_checks import as_flags, model_settings
from amos_fairseq.text.encoding import number_of_processes
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

# Values that replace those of the built-in recipes, which are for BERT's encoder. ModernBERT is trained without attention
# dropout, which attention to packed texts on a GPU does not have.
OF_ENCODER = {"modernbert": {"attention_dropout": 0.0}}
# Values for the head alone: the others would leave it near its random start.
OF_HEAD = {"lr": 1e-3, "layer_wise_lr_decay": 1.0}
# Settings of single objectives that decide which encoder of a checkpoint is fine-tuned.
BRANCH_FIELDS = {"representation", "task_heads", "mws_loss_weight", "rtd_loss_weight"}
OF_RECIPE = {"dropout", "attention_dropout", "pooler_dropout"}
MODEL_FIELDS = ({field.name for field in dataclasses.fields(EncoderConfig)} | BRANCH_FIELDS) - OF_PROCESS - OF_RECIPE
# Hyperparameters that the command line may replace for every task.
OVERRIDES = (
    *("lr", "epochs", "batch_size", "num_separators", "similar_lengths"),
    *("min_updates", "layers", "new_top_layers", "pooling", "freeze_encoder"),
    *FOR_WORDS,
)
MOST_SEEDS, MOST_RUNS = 10_000, 1024  # runs: at a time
# These variables of a launcher would turn a fine-tuning process into one of the launcher's ranks.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOG_FILE = "train.log"
IDENTITY_DIGITS = 8
TOKENS_PER_BATCH = 8192  # of evaluation
POLL_SECONDS = 0.2
SECONDS_BETWEEN_LINES = 30.0
SERVER_KILLED = 255  # multiprocessing's exit code where the process that starts trainings is gone


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


class RunFailed(Exception):
    """A run ended without a result. The message is one line."""


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
    try:
        num_kept, _ = parse_layers(str(settings["layers"]), number_of_layers(model))
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if num_kept != number_of_layers(model):
        # It was fine-tuned without its upper layers, of which TEAMS may have one more than its setting.
        model = {name: value for name, value in model.items() if name != "task_heads"} | {"encoder_layers": num_kept}
    num_updates = int(header["optimizer_history"][-1]["num_updates"])
    state = task_state_of(str(file), header)
    sources = (import_source(run["cfg"]["task"]) for _, run in runs_before(parent_of(header["cfg"])))
    source = import_source(header["cfg"]["task"])
    if not source and (first := next(filter(None, sources), "")):
        source = f"{first}, then {num_updates:,} updates ({settings['_name']})"
    sha256, arch = file_sha256(file), settings["_name"]
    return PretrainedCheckpoint(file, sha256, arch, model, state, num_updates, from_scratch, source)


def number_of_layers(model: Mapping[str, Any]) -> int:
    """Return the number of layers of an encoder; TEAMS with ``--task-heads extra_layer`` has one more than its setting."""
    return int(model["encoder_layers"]) + (model.get("task_heads") == "extra_layer")


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
    def origin(self) -> dict[str, Any]:
        """What determines the results of all runs, besides task, seed and hyperparameters."""
        return {
            "checkpoint_sha256": self.checkpoint.sha256,
            "from_scratch": self.checkpoint.from_scratch,
            "precision": self.precision,
        }

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
    """Check the arguments of a command and read the checkpoint's header. Nothing is written."""
    if not 1 <= args.seeds <= MOST_SEEDS:
        raise UserError(f"--seeds {args.seeds}: give a number from 1 to {MOST_SEEDS:,}")
    devices = find_devices(args.cpu, args.parallel)
    precision = choose_precision(args.precision, devices)
    if args.precision == "auto":
        say(f"precision {precision}", args.subcommand)
    start = read_pretrained_checkpoint(args.checkpoint, args.from_scratch)
    overrides = {name: value for name in OVERRIDES if (value := getattr(args, name, None)) is not None}
    recipe, overrides = recipe_for(start, args.recipe, args.size, overrides)
    seeds, out = tuple(range(1, args.seeds + 1)), Path(args.out).resolve()
    return Session(start, recipe, overrides, seeds, out, devices, precision, args.keep_checkpoints)


def recipe_for(
    start: PretrainedCheckpoint, name: str, size: str | None, overrides: dict[str, Any]
) -> tuple[Recipe, dict[str, Any]]:
    """Return a recipe for an encoder, and the values that replace those of the recipe: ``overrides`` and what the encoder, or a
    head alone, needs."""
    check_hyperparameters(argparse.Namespace(**overrides))  # before the recipe is read, which the message would name
    if name in recipe_names():  # a user's own recipe may be meant for this encoder
        of_head = OF_HEAD if overrides.get("freeze_encoder") else {}
        overrides = OF_ENCODER.get(str(start.model["encoder"]), {}) | of_head | overrides
    width = int(start.model["encoder_embed_dim"])
    recipe = load_recipe(name, size or size_for_width(width), overrides, width)
    try:
        for trial in {trial for trials in recipe.trials.values() for trial in trials}:
            kept, _ = parse_layers(trial.layers, number_of_layers(start.model))
            check_new_top_layers(trial.new_top_layers, kept, trial.freeze_encoder)
    except ValueError as error:
        raise UserError(str(error)) from error
    return recipe, overrides


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
    if not 1 <= parallel <= MOST_RUNS:
        raise UserError(f"--parallel {parallel}: give a number of runs from 1 to {MOST_RUNS:,}")
    if cpu or not torch.cuda.is_available():
        return ("cpu",) * parallel
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark."""

    name: str
    num_examples: int  # for training; it determines the number of updates
    main_score: str  # selects the best run and is shown in the table
    data_sha256: str  # fingerprint of the prepared data
    trials: tuple[Hyperparameters, ...]  # the combinations of hyperparameters to run: one, or those of a grid
    notes: tuple[str, ...] = ()  # footnotes for the scores, such as a training set that differs from the official one
    sampling_exponent: float | None = None  # of the shares of several tasks that one model learns

    @property
    def continues_across_epochs(self) -> bool:
        """Whether the examples that make no whole update at the end of an epoch begin the next one."""
        return self.sampling_exponent is not None

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
    """Return the values in which the trials differ, such as ``epochs3-lr2e-05``."""
    all_values = [trial.as_dict() for trial in trials]
    return "-".join(
        f"{name}{value}"
        for name, value in hyperparameters.as_dict().items()
        if any(values[name] != value for values in all_values)
    )


class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A subclass must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits independent tasks, one
    row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.csv``, ``.json``.
        title, columns: of the default ``table``. A title names the data; :func:`~amos_fairseq.experiments.table.run_benchmark`
            adds what ± means. ``columns``: score -> heading; scores that no task has are left out.
        trained_as: fairseq's task and criterion.
        unit: what the scores count.
        only_trains: prefixes of weights that no prediction needs.
        session: what all runs share.
        data: directory of the prepared data, with ``tokenizer/``.
        tasks: by name. OUT may hold results of several benchmarks, so that names must differ from those of others.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    trained_as: str
    unit: str = "rows"
    only_trains: tuple[str, ...] = ()
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

    def plan(self, tasks: Iterable[BenchmarkTask], intermediate: Path | None = None) -> list[TaskRun]:
        """Return every run of the tasks; seeds vary fastest, then trials. ``intermediate``: checkpoint to start from instead of
        the session's."""
        session = self.session
        start, origin = None if session.checkpoint.from_scratch else session.checkpoint.file, session.origin
        if intermediate is not None:
            start, origin = intermediate, origin | {"intermediate_sha256": file_sha256(intermediate)}
        runs = []
        for task in tasks:
            data = {"task": task.name, "data_sha256": task.data_sha256, "rows": task.num_examples}
            data |= {"sampling_exponent": task.sampling_exponent}
            for trial in task.trials:
                for seed in session.seeds:
                    settings = origin | data | self.more_settings(task.name, seed)
                    settings["hyperparameters"] = trial.as_dict()
                    folder = session.out / "runs" / task.name / content_sha256(settings)[:IDENTITY_DIGITS]
                    name = trial_name(trial, task.trials)
                    runs.append(TaskRun(task, trial, name, seed, start, settings, folder / f"seed{seed}"))
        return runs

    def execute(self, runner: "Runner") -> None:
        """Execute the runs of all tasks. Override it to change the order, or to start runs from the results of others."""
        runner.execute(self.plan(self.tasks.values()))

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
            cells = [format_spread(summary.scores.get(score), score) for score in shown]
            rows.append([f"{self.label(task)}: {self.session.row_name}", *cells])
            constant = constants.get(task, NO_CONSTANTS)
            rows += [[f"{self.label(task)}: {row}", *constant.cells(row, shown)] for row in constant.scores]
        return Table(self.title, ["", *(self.columns[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterable[str]:
        return ()

    def average(self, summaries: Summaries) -> dict[str, Any] | None:
        """Return name and value of the average of the main scores, where the table has one."""
        return None

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()


@dataclass(frozen=True)
class Failure:
    run: TaskRun
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class RunProgress:
    """Show a run with epoch, loss, dev score and remaining time: a bar in a terminal, elsewhere a line for each dev score and
    every 30 seconds."""

    def __init__(self, run: TaskRun) -> None:
        self.run, self.has_bar, self.last_line = run, sys.stderr.isatty(), monotonic()
        self.values: dict[str, str] = {}  # the last loss and dev score
        num_epochs, num_updates = run.schedule.num_epochs, run.schedule.total_updates
        place = sys.stderr if self.has_bar else io.StringIO()
        self.bar = tqdm(total=num_updates, desc=run.label, unit="update", leave=False, file=place)
        tqdm.write(f"{run.label}: {counted(num_epochs, 'epoch')}, {counted(num_updates, 'update')}")

    def advance(self, update: int, records: Sequence[dict[str, Any]]) -> None:
        """Show the number of updates so far, and what the run has written to its metrics file since the last call."""
        schedule, has_score = self.run.schedule, False
        epoch = int(update // schedule.updates_per_epoch) + 1  # of the next update, or of a new dev score
        for record in records:
            if record["split"] == "train":
                self.values["train"] = score_of(record, "loss")
            elif record["split"] == "valid":
                self.values["dev"], has_score = f"dev {score_of(record, self.run.task.main_score)}", True
                epoch = math.ceil(record["update"] / schedule.updates_per_epoch)
        place = f"epoch {min(epoch, schedule.num_epochs)} of {schedule.num_epochs}"
        self.bar.set_description(f"{self.run.label}, {place}", refresh=False)
        self.bar.set_postfix_str(", ".join(self.values.values()), refresh=False)
        self.bar.update(update - self.bar.n)
        if not self.has_bar and (has_score or monotonic() - self.last_line >= SECONDS_BETWEEN_LINES):
            self.last_line = monotonic()
            tqdm.write(str(self.bar))


def score_of(record: dict[str, Any], name: str) -> str:
    """Return a score in percent with its name, or the loss where the validation computes no score."""
    if name in record and name != "loss":
        value, digits = record[name], 1
    else:
        name, value, digits = "loss", record.get("loss"), 3
    return f"{name} {'is not finite' if value is None else f'{value:.{digits}f}'}"


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set ``stop`` on SIGINT and SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda number, frame: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interruptible(work: Callable[..., Any], *args: Any) -> Any:
    """Return ``work(*args, stop)``; SIGINT and SIGTERM set the event ``stop``, and end the command as Ctrl-C does."""
    stop = threading.Event()
    with stop_on_signals(stop):
        try:
            return work(*args, stop)
        except Stopped:
            raise KeyboardInterrupt from None


class Runner:
    """Executes runs of a benchmark on the session's devices.

    Attributes:
        stop: set by SIGINT and SIGTERM meanwhile.
        runs, failures: of all calls of :meth:`execute`.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark, self.session, self.stop = benchmark, benchmark.session, threading.Event()
        self.runs: list[TaskRun] = []
        self.failures: list[Failure] = []
        self._num_done = 0
        self._devices: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.session.devices:
            self._devices.put(device)
        self._lock = threading.Lock()  # of results, and of the checkpoints that stay

    def execute(self, runs: Sequence[TaskRun]) -> None:
        """Execute the runs that have no result yet; a failure does not stop the others.

        After a signal, wait until the processes have saved their state and exited, and raise :class:`Stopped`.
        """
        with explain_os_errors(f"{self.session.out} cannot be written", ": give another --out"):
            (self.session.out / "runs").mkdir(parents=True, exist_ok=True)
        open_runs = [run for run in runs if read_result(run.directory) is None]
        self.runs += runs
        self._num_done += len(runs) - len(open_runs)
        if len(open_runs) < len(runs):
            tqdm.write(f"{len(runs) - len(open_runs)} of {len(runs)} runs are already finished")
        if (
            self.session.devices[0] == "cpu"
        ):  # the process that forks the trainings has the variable when it imports PyTorch
            os.environ.setdefault("OMP_NUM_THREADS", cores_of_a_run(len(self.session.devices)))
        multiprocessing.set_forkserver_preload(["amos_fairseq.experiments.forked_training"])
        with stop_on_signals(self.stop), ThreadPoolExecutor(len(self.session.devices)) as threads:
            futures = [threads.submit(self._execute_one, run) for run in open_runs]
            while wait(futures, timeout=0.5).not_done:  # short waits: Python runs signal handlers in between
                pass
        if self.stop.is_set():
            raise Stopped
        for future in futures:
            future.result()

    def _execute_one(self, run: TaskRun) -> None:
        """Execute a run on the next free device, and show how it ended."""
        if self.stop.is_set():
            return
        device, progress = self._devices.get(), RunProgress(run)
        try:
            result = self._train_and_evaluate(run, device, progress)
            outcome = f"{result.main_score} {result.main:.1f} after epoch {result.epoch:g}"
            outcome += f" ({self._num_done} of {len(self.runs)} runs)"
        except Stopped:
            outcome = "stopped"
        except Exception as error:  # a bug in one run must not stop the others; its log gets the traceback
            reason = str(error)
            if not isinstance(error, RunFailed | UserError):
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError), open(run.directory / LOG_FILE, "a", encoding="utf-8") as log:
                    log.write(traceback.format_exc())
            self.failures.append(Failure(run, reason))
            outcome = f"FAILED: {reason}"
        finally:
            self._devices.put(device)
            progress.bar.close()
        tqdm.write(f"{run.label}: {outcome}")

    def _train_and_evaluate(self, run: TaskRun, device: str, progress: RunProgress) -> RunResult:
        benchmark, session, task = self.benchmark, self.session, run.task
        run.directory.mkdir(parents=True, exist_ok=True)
        benchmark.fill_directory(run)
        variables = environment(device, len(session.devices))
        train(training_command(run, benchmark, device), run.directory, variables, self.stop, progress.advance)
        progress.bar.set_description(f"{run.label}, scoring")
        checkpoint = run.directory / f"checkpoint_{run.hyperparameters.checkpoint}.pt"
        if not checkpoint.is_file():
            raise RunFailed(f"training ended without {checkpoint.name}")
        scores = benchmark.evaluate(task.name, checkpoint, device, self.stop)
        epoch, seconds = epoch_and_seconds(run, checkpoint)
        result = RunResult(
            task=task.name,
            trial=run.trial,
            seed=run.seed,
            identity=run.directory.parent.name,
            directory=str(run.directory.relative_to(session.out)),
            main_score=task.main_score,
            scores=scores,
            checkpoint=checkpoint.name,
            epoch=epoch,
            seconds=seconds,
            settings=run.settings,
            keeps_checkpoints=session.keep_checkpoints,
            versions=package_versions(),
            notes=list(task.notes),
        )
        with self._lock:
            self._finish(run, checkpoint, result)
            self._num_done += 1
        return result

    def _finish(self, run: TaskRun, checkpoint: Path, result: RunResult) -> None:
        """Write the result and, without --keep-checkpoints, keep the weights of the task's best run alone."""
        if self.session.keep_checkpoints:
            write_result(self.session.out, result)
            return
        # A kill leaves a checkpoint that continues the training, or a result and the checkpoint that it names.
        with weights_alone(checkpoint, self.benchmark.only_trains):
            write_result(self.session.out, result)
        remove_checkpoints(run.directory, kept=checkpoint)
        results = self.results(each for each in self.runs if each.task.name == run.task.name)
        best = best_run(results)
        for other in results:
            if other is not best and not other.keeps_checkpoints:
                remove_checkpoints(self.session.out / other.directory)

    def results(self, runs: Iterable[TaskRun]) -> list[RunResult]:
        """Return the results of runs that are finished, and of other seeds with the same settings, in order."""
        trials = {run.directory.parent: run.trial for run in runs}
        results = []
        for folder, trial in trials.items():
            for directory in folder.glob("seed*"):
                if (result := read_result(directory)) is not None:
                    results.append(
                        dataclasses.replace(result, trial=trial)
                    )  # another command may have had other trials
        return in_order(results)


def training_command(run: TaskRun, benchmark: Benchmark, device: str) -> list[str]:
    """Return the module and its arguments. Running it again continues from the run's own ``checkpoint_last.pt``."""
    session = benchmark.session
    command = ["fairseq_cli.train", *benchmark.train_flags(run), "--user-dir", str(PACKAGE)]
    command += ["--task", benchmark.trained_as, "--criterion", benchmark.trained_as]
    command += session.checkpoint.model_flags()
    command += run.hyperparameters.train_flags(run.schedule)
    if run.finetune_from is not None:
        command += ["--finetune-from-model", str(run.finetune_from)]
    command += ["--save-dir", str(run.directory), "--no-epoch-checkpoints", "--seed", str(run.seed)]
    # About a hundred records a run, and one at least every 20 updates.
    log_interval = min(max(1, run.schedule.total_updates // 100), 20)
    command += ["--log-format", "simple", "--log-interval", str(log_interval)]
    # With a GPU, a loader process hides the collating of a batch; on a CPU it would take a core from the training.
    command += ["--cpu", "--num-workers", "0"] if device == "cpu" else ["--num-workers", "1"]
    return command if session.precision == "float32" else [*command, f"--{session.precision}"]


def environment(device: str, num_devices: int) -> dict[str, str]:
    """Return this process's environment with one visible GPU, or for the CPU with no GPU and a share of the cores."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    if device.startswith("cuda:"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        variables["CUDA_VISIBLE_DEVICES"] = names[int(device.removeprefix("cuda:"))].strip()
        return variables
    # fairseq starts a rank on every visible GPU, even with --cpu. Runs that each use all cores slow one another down.
    return {"OMP_NUM_THREADS": cores_of_a_run(num_devices)} | variables | {"CUDA_VISIBLE_DEVICES": ""}


def cores_of_a_run(num_runs: int) -> str:
    return str(max(1, number_of_processes(None) // num_runs))


def train(
    command: list[str],
    directory: Path,
    variables: Mapping[str, str],
    stop: threading.Event,
    report: Callable[[int, list[dict[str, Any]]], None],
    start: Callable[[list[str], Mapping[str, str], Path], Any] = ForkedCommand,
) -> None:
    """Run the command until it exits; its output is appended to ``train.log``. Once ``stop`` is set, it is asked to save a
    checkpoint and exit.

    Raise :class:`Stopped` then, or :class:`RunFailed` for any other failure. If the process of a killed command still trains in
    ``directory``, it holds the lock of this SAVE_DIR, and the new process fails with a message that says so.

    Args:
        report: called several times a second with the number of updates so far and the records of the metrics file since the
            last call.
        start: starts the process. It appends its output to a file, and it ends when this process ends.
    """
    metrics, log = NewRecords(directory), directory / LOG_FILE
    log.touch()
    begin = log.stat().st_size  # earlier output belongs to an earlier part of the run
    process = start(command, variables, log)
    deadline, code = None, None
    try:
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_SECONDS)
            records = metrics.read()  # also the score of the last epoch
            report(metrics.update, records)
            if stop.is_set() and deadline is None:
                process.send_signal(signal.SIGTERM)
                deadline = monotonic() + SECONDS_TO_SAVE
            elif deadline is not None and monotonic() > deadline:
                process.kill()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code != 0:
        raise Stopped if stop.is_set() else RunFailed(_failure_reason(code, log, begin))


def _failure_reason(code: int, log: Path, begin: int) -> str:
    """Return the line of a user error if there is one, otherwise the last line of the output."""
    by_signal = {REQUEUE: "SIGTERM, SIGUSR1 or SIGUSR2", INTERRUPTED: "SIGINT"}
    if code in by_signal:
        return f"ended by {by_signal[code]} from outside"
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}{', perhaps because memory was full' if name == 'SIGKILL' else ''}"
    if code == SERVER_KILLED:
        return "the process that starts trainings was killed"
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    user_errors = [line for line in lines if line.startswith("amos_fairseq: error:")]
    last = (user_errors or lines or ["no output"])[-1]
    return last.removeprefix("amos_fairseq: error:").strip()


def epoch_and_seconds(run: TaskRun, checkpoint: Path) -> tuple[float, float]:
    """Return the number of epochs at ``checkpoint`` and the duration of the whole training in seconds."""
    updates, schedule = read_header(str(checkpoint))["optimizer_history"][-1]["num_updates"], run.schedule
    epochs = schedule.num_epochs if updates == schedule.total_updates else updates / schedule.updates_per_epoch
    return round(float(epochs), 4), round(training_seconds(run.directory / "checkpoint_last.pt"), 1)


def training_seconds(checkpoint: Path) -> float:
    """Return the training time up to a checkpoint, over all parts of the run, with validation; 0 if it is unknown."""
    try:
        return training_seconds_of(read_header(str(checkpoint)))
    except ValueError:
        return 0.0


@contextlib.contextmanager
def weights_alone(checkpoint: Path, only_trains: tuple[str, ...]) -> Iterator[None]:
    """Replace a checkpoint, after the body, by one without what only training needs: the optimizer state, two thirds of the
    file, and the weights with the prefixes ``only_trains``."""
    state = read_header(str(checkpoint))
    state["last_optimizer_state"] = None
    state["model"] = {key: value for key, value in state["model"].items() if not key.startswith(only_trains)}
    with (
        explain_write_errors(checkpoint, "free some space, then start again"),
        whole_file(str(checkpoint)) as unfinished,
    ):
        torch.save(state, unfinished)
        yield


def remove_checkpoints(directory: Path, kept: Path | None = None) -> None:
    for file in directory.glob("checkpoint*.pt"):
        if file != kept:
            file.unlink()


def batches(lengths: Sequence[int] | np.ndarray, stop: threading.Event) -> Iterator[list[int]]:
    """Yield indices of examples of similar length for evaluation, and show progress where that takes longer; raise
    :class:`Stopped` once ``stop`` is set."""
    with progress_bar(int(sum(lengths)), "predict", "token", delay=2) as bar:
        bar.leave = False
        for indices in batches_by_length(lengths, TOKENS_PER_BATCH):
            if stop.is_set():
                raise Stopped
            yield indices
            bar.update(sum(int(lengths[index]) for index in indices))


def usable_folder(folder: Path) -> Path:
    """Return the absolute path; refuse one that fairseq would take for several."""
    folder = folder.resolve()
    if os.pathsep in str(folder):
        raise UserError(f"{folder}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    return folder
