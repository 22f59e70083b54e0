"""A comparison from its plan to its tables: every entry gets the same budget, then the same fine-tuning runs."""

import argparse
from pathlib import Path
from typing import Any

from budgets import PARTS, Budget, divisible_updates, flops_per_update, schedule_settings, share_name, updates_per_epoch
from entries import CONFIGS, Entry, check_shared, compose_entry, read_entries, read_preset, read_yaml
from omegaconf import DictConfig
from runs import FineTuning, Pretraining, Runner, measure_seconds_per_update

from amos_fairseq.downstream.texts.command import read_text_data
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.experiments.benchmark import RunFailed, find_devices
from amos_fairseq.experiments.records import read_record, write_record
from amos_fairseq.experiments.runner import LOG_FILE
from amos_fairseq.files import directory_sha256, file_sha256

NAME = "comparison"
PLAN_FILE, SETUP_FILE = "plan.json", "setup.json"


class Comparison:
    """The work of one call, checked before anything is written.

    Args:
        options: options of the command, with absolute paths and parsed values (see compare.py).

    Raises:
        UserError: an option cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.budget: Budget = options.budget
        self.preset = read_preset(options.size, options.settings)
        self.entries = read_entries(options.entries, options.size, options.objectives)
        self.paper = read_yaml(CONFIGS / "paper.yaml")
        self.device = "cpu" if find_devices(options.cpu, 1)[0] == "cpu" else "cuda:0"
        shortest = {entry.name: self._compose(entry, PARTS) for entry in self.entries}
        self.shared = check_shared(shortest)
        self.updates_per_epoch = updates_per_epoch(shortest[self.entries[0].name])
        self.costs = {name: flops_per_update(cfg) for name, cfg in shortest.items()}
        self._check_glue()
        self.pretrainings: list[Pretraining] = []
        self.failures: list[str] = []

    @property
    def fine_tuning_settings(self) -> dict[str, Any]:
        """Flags of ``amos glue`` -> values; the user's flags override the preset."""
        given = {"recipe": self.options.recipe, "lr": self.options.lr}
        given = {name: value for name, value in given.items() if value is not None}
        if self.options.recipe:  # another recipe has its own learning rates
            return given
        return self.preset.fine_tuning | given

    @property
    def first_shard(self) -> Path:
        """All shards have the same vocabulary."""
        return Path(self.options.data.split(":")[0])

    def _settings(self, entry: Entry, max_update: int) -> dict[str, Any]:
        schedule = schedule_settings(max_update, self.preset.warmup(max_update))
        return {"task.data": self.options.data, **self.preset.settings, **entry.settings, **schedule}

    def _compose(self, entry: Entry, max_update: int) -> DictConfig:
        return compose_entry(entry, self._settings(entry, max_update))

    def _check_glue(self) -> None:
        """Make the checks of ``amos glue`` before pretraining."""
        own = self.first_shard / "tokenizer"
        for folder in (self.options.glue / task for task in self.options.tasks):
            read_text_data(folder)
            if not (own.is_dir() and directory_sha256(folder / "tokenizer") == directory_sha256(own)):
                raise UserError(f"{folder} was not prepared with the tokenizer {own}: prepare it with that one")

    def claim(self) -> None:
        """Reserve OUT for this budget and these settings; raise :class:`UserError` if it contains others."""
        setup = {
            "size": self.options.size,
            "budget": str(self.budget),
            "settings": self.preset.settings,
            "dictionary_sha256": file_sha256(self.first_shard / "dict.txt"),
        }
        file, this_command = self.out / SETUP_FILE, "this command in another OUT"
        if read_record(file, dict, "the settings of a comparison", this_command) not in (None, setup):
            raise UserError(f"{self.out} holds a comparison with other settings ({file}): give another OUT")
        with explain_os_errors(f"{self.out} cannot be written", ": give another OUT"):
            self.out.mkdir(parents=True, exist_ok=True)
            write_record(file, setup)

    def plan(self, runner: Runner) -> None:
        """Choose the number of updates of every entry, and check existing runs.

        Raises:
            UserError: the budget cannot be divided, a folder contains a run with other settings, or an entry fails when it is
                timed.
            Stopped: the runner was stopped while updates were timed.
        """
        for entry in self.entries:
            wanted = self.budget.updates(self.costs[entry.name], lambda entry=entry: self._seconds(entry, runner))
            max_update = divisible_updates(self.budget, entry.name, wanted, self.updates_per_epoch)
            cfg, settings = self._compose(entry, max_update), self._settings(entry, max_update)
            pretraining = Pretraining(entry, cfg, settings, self.out / entry.name / "pretraining", self.device)
            pretraining.check()
            self.pretrainings.append(pretraining)

    def _seconds(self, entry: Entry, runner: Runner) -> float:
        """Return the seconds of an update, measured once: the length of a run must not change between calls."""
        file = self.out / entry.name / PLAN_FILE
        self.claim()
        plan = read_record(file, dict, "the seconds of an update", "this command, after you have removed it")
        if plan is None:
            settings, directory = self._settings(entry, PARTS), self.out / entry.name / "timing"
            try:
                seconds = measure_seconds_per_update(entry, settings, directory, self.device, runner)
            except RunFailed as error:
                raise UserError(f"{entry.name} does not train: {error} (log: {directory / LOG_FILE})") from error
            plan = {"seconds_per_update": seconds}
            write_record(file, plan)
        return float(plan["seconds_per_update"])

    def pretrain(self, runner: Runner) -> None:
        """Pretrain all entries one after another; after a failure continue with the next. May raise Stopped."""
        for pretraining in self.pretrainings:
            if pretraining.finished:
                pretraining.prune()
            else:
                self._attempt(f"{pretraining.entry.name}: pretraining", pretraining.save_dir, pretraining, runner)

    def fine_tune(self, runner: Runner) -> None:
        """Fine-tune from the largest share to the smallest, so that the main table comes first. May raise Stopped."""
        for share in sorted(self.options.fine_tune_at, reverse=True):
            for pretraining in self.pretrainings:
                fine_tuning = self.fine_tuning(pretraining, share)
                if fine_tuning.checkpoint is not None and not fine_tuning.finished:
                    self._attempt(fine_tuning.label, fine_tuning.directory, fine_tuning, runner)

    def fine_tuning(self, pretraining: Pretraining, share: float) -> FineTuning:
        """Return the fine-tuning runs of the checkpoint at a share of the budget, which may not exist yet."""
        name, point = pretraining.entry.name, share_name(share)
        flags = [str(part) for flag, value in self.fine_tuning_settings.items() for part in (f"--{flag}", value)]
        if self.device == "cpu":
            flags += ["--cpu", "--parallel", str(self.options.parallel)]
        return FineTuning(
            f"{name}: fine-tuning at {point}",
            pretraining.checkpoint(share),
            self.options.glue,
            self.out / name / "fine_tuning" / point,
            self.options.tasks,
            self.options.seeds,
            tuple(flags),
        )

    def _attempt(self, label: str, directory: Path, runs: Pretraining | FineTuning, runner: Runner) -> None:
        try:
            runs.run(runner)
        except RunFailed as error:
            self.failures.append(f"{label}: {error} (log: {directory / LOG_FILE})")
