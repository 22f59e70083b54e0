"""What the report says about one pretraining run, read from its folder."""

import dataclasses
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from amos_fairseq.checkpoint_files import checkpoint_file, read_header, training_seconds_of
from amos_fairseq.checkpoints.read import LoadedCheckpoint, read_state, restore_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.measure.configuration import build_counted_update, checkpoint_configuration, missing_settings
from amos_fairseq.measure.flops import by_autograd, by_thesis, forward_of_batch
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.output.terminal import say
from amos_fairseq.report.curves import Curve, RunCurves, distinct_names, read_curves
from amos_fairseq.report.inspect_text import inspect_text, text_of_corpus
from amos_fairseq.report.inspection import Inspection
from amos_fairseq.report.replaced_tokens import DepthLosses, held_out_blocks, replaced_token_losses
from amos_fairseq.run.metrics_file import FILE_NAME

LAST_CHECKPOINT = "checkpoint_last.pt"
LOG = "hydra_train.log"  # what Hydra names the log of fairseq-hydra-train and amos train
LONGEST_LINE = 1000  # of a log, in characters; longer ones are read in parts
GPU = re.compile(r"name = (\S.*?)\s*$", re.MULTILINE)  # fairseq logs a line "rank 0: ... ; name = ..." for each GPU


@dataclass(frozen=True)
class ReportOptions:
    """What is computed for each run.

    Attributes:
        text: held-out text for the losses by depth; None for the run's validation split.
        sentences: texts for the replaced tokens by depth; none for a paragraph of the validation split.
        num_masked: masked tokens for the losses by depth.
    """

    text: str | None = None
    sentences: Sequence[str] = ()
    num_masked: int = 4096
    seed: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class PretrainingCost:
    """The cost of pretraining. A field is None where the run's files do not contain it.

    Attributes:
        tokens_per_update: of full blocks, ``<s>`` included.
        flops_per_update: products of matrices in the forward and backward pass (``amos flops``, "today").
        thesis_flops_per_update: by the convention of thesis section 5.2.2.
        seconds: running time of all training processes, pauses between them excluded.
        tokens_per_second: median of the logged values.
        hardware: names of the devices in the log.
    """

    num_updates: int
    tokens_per_update: int | None = None
    flops_per_update: int | None = None
    thesis_flops_per_update: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    hardware: str | None = None


@dataclass(frozen=True)
class PretrainingRun:
    """One run.

    Attributes:
        checkpoint_updates: updates of the checkpoint that ``losses`` and ``inspections`` were computed with.
        setup: how replacements are made, such as "learned mixture of depths 4, 6, 8".
        missing: by part of the report, the reason why this run has none.
    """

    folder: Path
    name: str
    cost: PretrainingCost
    curves: RunCurves | None = None
    cfg: DictConfig | None = None
    checkpoint_updates: int = 0
    setup: str = ""
    losses: list[DepthLosses] = field(default_factory=list)
    inspections: list[Inspection] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def objective(self) -> str:
        return str(self.cfg.criterion._name) if self.cfg is not None else ""


def distinct_folders(folders: Sequence[str]) -> list[Path]:
    """Return each folder once, under the first of its names."""
    names: dict[Path, Path] = {}
    for folder in map(Path, folders):
        names.setdefault(folder.resolve(), folder)
    return list(names.values())


def read_runs(folders: Sequence[str], options: ReportOptions) -> list[PretrainingRun]:
    """Read the runs in these SAVE_DIRs and compute what the report shows of their models; one given twice counts once.

    Raises:
        UserError: a folder holds no run of pretraining, or has damaged files.
    """
    paths = distinct_folders(folders)
    for path in paths:
        if not any((path / name).is_file() for name in (FILE_NAME, LAST_CHECKPOINT)):
            raise UserError(
                f"{path} holds neither {FILE_NAME} nor {LAST_CHECKPOINT}: give the SAVE_DIR of a run of pretraining"
            )
    runs = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        say(f"run {len(runs) + 1} of {len(paths)}, {name}: reading its files and evaluating its model", "report")
        runs.append(_read_run(path, name, options))
    return runs


def _read_run(path: Path, name: str, options: ReportOptions) -> PretrainingRun:
    curves = None
    if (path / FILE_NAME).is_file():
        (read,) = read_curves([path])
        curves = dataclasses.replace(read, name=name)
    if not (path / LAST_CHECKPOINT).is_file():
        reason = f"{path} has no {LAST_CHECKPOINT}"
        return PretrainingRun(path, name, cost_of(path, curves), curves, missing={"checkpoint": reason})
    file = checkpoint_file(path)
    state = read_state(file)
    loaded = restore_checkpoint(file, state)
    if not isinstance(loaded.model, PretrainingModel):
        raise UserError(f"{file} is fine-tuned: give the SAVE_DIR of its pretraining, and its scores with --glue")
    missing: dict[str, str] = {}
    cfg, vocabulary_size = checkpoint_configuration(file, state)
    if missing_settings(cfg):
        cfg, missing["recipe"] = None, f"{file} does not contain the settings of its run"
    stored = stored_seconds(state, loaded.parent)
    del state  # with the state of the optimizer
    inspections = _inspections(loaded, options, missing)
    losses = _losses(loaded, options, missing)
    cost = cost_of(path, curves, loaded.num_updates, stored, cfg, vocabulary_size)
    return PretrainingRun(
        path, name, cost, curves, cfg, loaded.num_updates, setup_of(loaded), losses, inspections, missing
    )


def _inspections(loaded: LoadedCheckpoint, options: ReportOptions, missing: dict[str, str]) -> list[Inspection]:
    try:
        texts = options.sentences or [text_of_corpus(loaded, "--sentence")]
    except UserError as error:
        missing["sentences"] = str(error)
        return []
    return [inspect_text(loaded, text, options.seed, None, top=1, with_samples=True) for text in texts]


def _losses(loaded: LoadedCheckpoint, options: ReportOptions, missing: dict[str, str]) -> list[DepthLosses]:
    try:
        blocks = held_out_blocks(loaded, options.text)
    except UserError as error:
        if options.text is not None:
            raise
        missing["text"] = str(error)
        return []
    loaded.model.to(options.device)
    losses = replaced_token_losses(loaded, blocks, options.seed, options.num_masked)
    if not losses:
        missing["losses"] = "the objective has no discriminator that detects replaced tokens"
    return losses


def setup_of(loaded: LoadedCheckpoint) -> str:
    """Describe how the replaced tokens are made: AMOS section 5.3 calls these the curriculum setups."""
    model = loaded.model
    depths = model.depth_names
    if len(depths) == 1:
        return f"generator of depth {depths[0]}"
    kind = str(model.cfg.mixture).replace("_", " ")
    if kind in ("learned", "uniform", "fixed"):
        kind += " mixture"
    separate = " of separate generators" if model.cfg.separate_generators else ""
    return f"{kind}{separate}, depths {', '.join(depths)}"


def cost_of(
    path: Path,
    curves: RunCurves | None,
    num_updates: int = 0,
    stored: float = 0.0,
    cfg: DictConfig | None = None,
    vocabulary_size: int | None = None,
) -> PretrainingCost:
    """Return the cost of a run until its last logged update, or until its checkpoint.

    Args:
        num_updates, stored: updates and :func:`stored_seconds` of the checkpoint; 0 without one.
    """
    logged = curves.curves.get("train", {}) if curves else {}
    updates = [update for curve in logged.values() for update in curve.updates]
    walls, rates = ([x for x in logged.get(key, Curve()).values if not math.isnan(x)] for key in ("wall", "wps"))
    cost = PretrainingCost(
        max([num_updates, *updates]),
        seconds=max(logged_seconds(walls), stored) or None,
        tokens_per_second=statistics.median(filter(None, rates)) if any(rates) else None,
        hardware=hardware_of(path),
    )
    if cfg is None:
        return cost
    try:
        update = build_counted_update(cfg, vocabulary_size)
        thesis, today = by_thesis(update, forward_of_batch(update)["Global"]), by_autograd(update)
    except (UserError, ArithmeticError):  # no end, or a cost per update that varies
        return cost
    return dataclasses.replace(
        cost,
        tokens_per_update=today.tokens_per_update,
        flops_per_update=today.per_update,
        thesis_flops_per_update=thesis.per_update,
    )


def stored_seconds(state: dict[str, Any], parent: str) -> float:
    """Return the running time of all processes of a run until its checkpoint; 0 if it cannot be known.

    fairseq stores it with that of the checkpoint that the run started from, which may be gone or belong to somebody else.

    Args:
        state: content of the checkpoint.
        parent: the checkpoint that the run started from; empty without one.
    """
    if parent and not os.path.isfile(parent):  # False also where the folder may not be read
        return 0.0
    try:
        before = training_seconds_of(read_header(parent)) if parent else 0.0
        return training_seconds_of(state) - before
    except (UserError, ValueError):
        return 0.0


def logged_seconds(walls: Sequence[float]) -> float:
    """Return at least the running time that the log shows: ``wall`` starts at 0 in each process of a run.

    A process whose first record has a larger ``wall`` than the last one of the process before it is not recognized.
    """
    total, last = 0.0, math.inf
    for wall in walls:
        total += wall - last if wall >= last else wall
        last = wall
    return total


def hardware_of(path: Path) -> str | None:
    """Return the names of the GPUs in the run's log, with their number; None where there is none."""
    gpu, ranks = None, set()
    try:
        if not (path / LOG).is_file():  # opening a pipe waits for its writer
            return None
        with (path / LOG).open(encoding="utf-8", errors="replace") as log:
            while line := log.readline(LONGEST_LINE):  # a log may be large, and a damaged one a single line
                if "capabilities =" in line and (match := GPU.search(line)):
                    gpu = match[1]
                    ranks.add(re.sub(r".*(rank\s+\d+).*", r"\1", line))
    except OSError:
        return None
    return f"{len(ranks)} x {gpu}" if len(ranks) > 1 else gpu
