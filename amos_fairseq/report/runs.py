"""What the report says about one pretraining run, read from its folder."""

import contextlib
import dataclasses
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from amos_fairseq.checkpoint_files import checkpoint_file, training_seconds_of
from amos_fairseq.checkpoints.read import LoadedCheckpoint, read_state, restore_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names
from amos_fairseq.flops.configuration import checkpoint_configuration, missing_settings, training_flops
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.output.terminal import say
from amos_fairseq.report.curves import RunCurves, read_curves
from amos_fairseq.report.inspection import Inspection, inspect_text, text_of_corpus
from amos_fairseq.report.replaced_tokens import DepthLosses, held_out_blocks, replaced_token_losses
from amos_fairseq.run.metrics_file import FILE_NAME

LAST_CHECKPOINT = "checkpoint_last.pt"
LOG = "hydra_train.log"  # what Hydra names the log of fairseq-hydra-train and amos train
SEED = 1  # of the masked positions and the sampled tokens
MASKED_TOKENS = 4096  # of each depth, on which its losses are computed
LONGEST_LINE = 1000  # of a log, in characters; longer ones are read in pieces
GPU = re.compile(r"(rank\s+\d+): capabilities = .*; name = (\S.*?)\s*$")  # in the line that fairseq logs for each GPU


@dataclass
class PretrainingRun:
    """One run. A value is None or empty where the run's files do not contain it."""

    folder: Path
    name: str
    num_updates: int = 0  # until the last logged one, or until the checkpoint
    curves: RunCurves | None = None
    seconds: float | None = None  # of all training processes, without pauses between them
    tokens_per_second: float | None = None  # median of the logged values
    hardware: str | None = None
    cfg: DictConfig | None = None
    tokens_per_update: int | None = None  # of full blocks, <s> included
    flops_per_update: int | None = None  # products of matrices in the forward and backward pass (amos flops)
    checkpoint_updates: int = 0  # of the checkpoint that losses and inspections were computed with
    setup: str = ""  # how replacements are made, such as "learned mixture of depths 4, 6, 8"; none are in MLM
    losses: list[DepthLosses] = field(default_factory=list)
    inspections: list[Inspection] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # content of the report -> why this run has none

    @property
    def objective(self) -> str:
        return str(self.cfg.criterion._name) if self.cfg is not None else ""


def distinct_folders(folders: Sequence[str]) -> list[Path]:
    """Return each folder once, under the first of its names."""
    names: dict[Path, Path] = {}
    for folder in map(Path, folders):
        names.setdefault(folder.resolve(), folder)
    return list(names.values())


def read_runs(
    folders: Sequence[str], text: str | None = None, sentences: Sequence[str] = (), device: str = "cpu"
) -> list[PretrainingRun]:
    """Read the runs in these SAVE_DIRs and compute what the report shows of their models; one given twice counts once.

    ``text`` is for the losses by depth (None: the run's validation split); ``sentences`` are for the replaced tokens by depth
    (none: a paragraph of that split).
    """
    paths = distinct_folders(folders)
    for path in paths:
        if not any((path / name).is_file() for name in (FILE_NAME, LAST_CHECKPOINT)):
            raise UserError(f"{path} holds neither {FILE_NAME} nor {LAST_CHECKPOINT}: give the SAVE_DIR of a run")
    runs = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        say(f"run {len(runs) + 1} of {len(paths)}, {name}: reading its files and evaluating its model", "report")
        run = PretrainingRun(path, name, hardware=hardware_of(path))
        add_log(run)
        if (path / LAST_CHECKPOINT).is_file():
            add_checkpoint(run, text, sentences, device)
        else:
            run.missing["checkpoint"] = f"{path} has no {LAST_CHECKPOINT}"
        runs.append(run)
    return runs


def add_log(run: PretrainingRun) -> None:
    """Add the curves of ``metrics.jsonl``, and the updates, time and speed that they show."""
    if not os.path.lexists(run.folder / FILE_NAME):  # what is there and no file is refused
        return
    (curves,) = read_curves([run.folder])
    run.curves = dataclasses.replace(curves, name=run.name)
    run.num_updates = max((max(curve.updates) for curve in curves.curves.get("train", {}).values()), default=0)
    walls, rates = (
        [value for value in curves.get("train", key).values if not math.isnan(value)] for key in ("wall", "wps")
    )
    run.seconds = logged_seconds(walls) or None
    run.tokens_per_second = statistics.median(filter(None, rates)) if any(rates) else None


def logged_seconds(walls: Sequence[float]) -> float:
    """Return a lower bound of the running time from the log, in which ``wall`` starts at 0 in each process of a run.

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
    with contextlib.suppress(OSError):
        if (path / LOG).is_file():  # opening a pipe waits for its writer
            with (path / LOG).open(encoding="utf-8", errors="replace") as log:
                while line := log.readline(LONGEST_LINE):  # a log may be large, and a damaged one a single line
                    if match := GPU.search(line):
                        ranks.add(match[1])
                        gpu = match[2]
    return f"{len(ranks)} x {gpu}" if len(ranks) > 1 else gpu


def add_checkpoint(run: PretrainingRun, text: str | None, sentences: Sequence[str], device: str) -> None:
    file = checkpoint_file(run.folder)
    state = read_state(file)
    loaded = restore_checkpoint(file, state)
    if not isinstance(loaded.model, PretrainingModel):
        raise UserError(f"{file} is fine-tuned: give the SAVE_DIR of its pretraining, and its scores with --glue")
    run.checkpoint_updates = loaded.num_updates
    run.num_updates = max(run.num_updates, loaded.num_updates)
    run.seconds = max(run.seconds or 0, stored_seconds(state)) or None
    cfg, vocabulary_size = checkpoint_configuration(file, state)
    del state  # with the state of the optimizer
    if not missing_settings(cfg):
        run.cfg = cfg
        if cfg.optimization.max_update == 0:  # of a budget of time; the cost of an update is that of a run with an end
            cfg.optimization.max_update = loaded.num_updates
            if OmegaConf.select(cfg, "lr_scheduler.minutes"):
                cfg.lr_scheduler.minutes = 0.0
        try:
            cost = training_flops(cfg, vocabulary_size)
            run.tokens_per_update, run.flops_per_update = cost.tokens_per_update, cost.per_update
        except (UserError, ArithmeticError):
            pass  # no end, or a cost per update that varies
    try:
        run.setup = setup_of(loaded)
    except UserError as error:  # the file of a frozen generator is not there
        run.missing |= dict.fromkeys(("sentences", "losses"), str(error))
        return
    if not sentences:
        try:
            sentences = [text_of_corpus(loaded, "--sentence")]
        except UserError as error:
            run.missing["sentences"] = str(error)
    run.inspections = [inspect_text(loaded, sentence, SEED, None, top=1, with_samples=True) for sentence in sentences]
    try:
        blocks = held_out_blocks(loaded, text)
    except UserError as error:
        if text is not None:
            raise
        run.missing["text"] = str(error)
        return
    loaded.model.to(device)
    run.losses = replaced_token_losses(loaded, blocks, SEED, MASKED_TOKENS)
    if not run.losses:
        run.missing["losses"] = "the objective has no discriminator that detects replaced tokens"


def setup_of(loaded: LoadedCheckpoint) -> str:
    """Describe how the replaced tokens are made: AMOS section 5.3 calls these the curriculum setups."""
    model = loaded.model
    depths = model.depth_names
    if isinstance(model, MlmModel):
        return ""
    if len(depths) == 1:
        return f"generator of depth {depths[0]}"
    mixture = str(model.cfg.mixture).replace("_", " ")
    if mixture in ("learned", "uniform", "fixed"):
        mixture += " mixture"
    separate = " of separate generators" if model.cfg.separate_generators else ""
    return f"{mixture}{separate}, depths {', '.join(depths)}"


def stored_seconds(state: dict[str, Any]) -> float:
    """Return the running time of all processes of a run until its checkpoint; 0 if it cannot be known."""
    try:
        return training_seconds_of(state)
    except ValueError:
        return 0.0
