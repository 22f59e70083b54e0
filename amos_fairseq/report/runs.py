"""What the report says about one pretraining run, read from its folder."""

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from amos_fairseq.checkpoint_files import checkpoint_file, training_seconds_of
from amos_fairseq.checkpoints.read import LoadedCheckpoint, read_state, restore_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names
from amos_fairseq.flops import checkpoint_configuration, training_flops
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.output.terminal import say
from amos_fairseq.report.curves import RunCurves, read_curves
from amos_fairseq.report.inspection import (
    DepthLosses,
    Inspection,
    held_out_blocks,
    inspect_text,
    replaced_token_losses,
    text_of_corpus,
)
from amos_fairseq.run.metrics_file import FILE_NAME

LAST_CHECKPOINT = "checkpoint_last.pt"
SEED = 1  # of the masked positions and the sampled tokens
MASKED_TOKENS = 4096  # on which the losses of each depth are computed


@dataclass
class Run:
    """One run. A value is None or empty where the run's files do not contain it."""

    folder: Path
    name: str
    curves: RunCurves
    num_updates: int = 0  # until the last logged one, or until the checkpoint
    seconds: float | None = None  # of training until the checkpoint, without pauses
    tokens_per_second: float | None = None  # median of the logged values
    cfg: DictConfig | None = None
    tokens_per_update: int | None = None  # of full blocks, <s> included
    flops_per_update: int | None = None  # products of matrices in the forward and backward pass, by amos flops
    checkpoint_updates: int = 0  # of the checkpoint that losses and inspections were computed with
    setup: str = ""  # how replacements are made, such as "learned mixture, depths 4, 6, 8"; empty for MLM
    losses: list[DepthLosses] = field(default_factory=list)
    inspections: list[Inspection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # why something of this run is not shown

    @property
    def objective(self) -> str:
        return str(self.cfg.criterion._name) if self.cfg is not None else ""

    @property
    def verdict(self) -> str:
        """What the last validation shows: the least MLM loss against the unigram entropy, and the AUC against chance."""
        last = {key: curve.values[-1] for key, curve in self.curves.curves.get("valid", {}).items()}
        losses = [value for key, value in last.items() if key.startswith("mlm_loss_")]
        gain, auc = last.get("unigram_entropy", math.nan) - min(losses, default=math.nan), last.get("rtd_auc", math.nan)
        parts = []
        if not math.isnan(gain):
            side, use = "below" if gain > 0 else "above", "uses" if gain >= 0.05 else "does not yet use"
            parts.append(f"the MLM loss is {abs(gain):.2f} nats {side} the unigram entropy (the model {use} context)")
        if not math.isnan(auc):
            parts.append(
                f"the AUC of detection is {auc:.2f} ({'' if auc >= 0.55 else 'not clearly '}above chance, 0.50)"
            )
        return f"{self.name}: on the validation text {' and '.join(parts)}." if parts else ""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (FILE_NAME, LAST_CHECKPOINT))


def read_runs(
    folders: Sequence[Path], text: str | None = None, sentences: Sequence[str] = (), device: str = "cpu"
) -> list[Run]:
    """Read the runs in these SAVE_DIRs and compute what the report shows of their models.

    ``text`` is for the losses by depth (None: the run's validation split); ``sentences`` are for the inspections (none: a
    paragraph of that split).
    """
    runs = []
    for folder, name, curves in zip(folders, distinct_names(folders), read_curves(folders), strict=True):
        say(f"run {len(runs) + 1} of {len(folders)}, {name}: reading its files and evaluating its model", "report")
        run = Run(folder, name, curves)
        add_log(run)
        if (folder / LAST_CHECKPOINT).is_file():
            add_checkpoint(run, text, sentences, device)
        else:
            run.notes.append(f"{folder} has no {LAST_CHECKPOINT}, so no model is shown")
        runs.append(run)
    return runs


def add_log(run: Run) -> None:
    """Add the updates and the speed that the curves show."""
    training = run.curves.curves.get("train", {})
    run.num_updates = max((curve.updates[-1] for curve in training.values()), default=0)
    rates = [value for value in run.curves.get("train", "wps").values if not math.isnan(value)]
    run.tokens_per_second = statistics.median(filter(None, rates)) if any(rates) else None


def add_checkpoint(run: Run, text: str | None, sentences: Sequence[str], device: str) -> None:
    file = checkpoint_file(run.folder)
    state = read_state(file)
    loaded = restore_checkpoint(file, state)
    run.num_updates = max(run.num_updates, loaded.num_updates)
    with contextlib.suppress(ValueError):  # the checkpoint has no training time
        run.seconds = training_seconds_of(state)
    if not isinstance(loaded.model, PretrainingModel):
        run.notes.append(f"{run.name} is fine-tuned: its curves are shown; give its OUT to see the scores")
        return
    run.checkpoint_updates = loaded.num_updates
    with contextlib.suppress(UserError):  # imported weights have no settings of a run
        add_cost(run, *checkpoint_configuration(file, state))
    del state  # with the state of the optimizer
    with noted_errors(run):
        run.setup = setup_of(loaded)
        run.inspections = [inspect_text(loaded, sentence, SEED) for sentence in sentences or [text_of_corpus(loaded)]]
    with noted_errors(run):
        blocks = held_out_blocks(loaded, text)
        loaded.model.to(device)
        run.losses = replaced_token_losses(loaded, blocks, SEED, MASKED_TOKENS)


@contextlib.contextmanager
def noted_errors(run: Run) -> Iterator[None]:
    """Turn an error, such as a corpus that was moved or a frozen generator without its file, into a note of the page."""
    try:
        yield
    except UserError as error:
        run.notes.append(f"{run.name}: {error}")


def add_cost(run: Run, cfg: DictConfig, vocabulary_size: int) -> None:
    run.cfg = cfg
    if cfg.optimization.max_update == 0:  # a run with a time budget: as if it ended at this update
        cfg.optimization.max_update = run.checkpoint_updates
        if OmegaConf.select(cfg, "lr_scheduler.minutes"):
            cfg.lr_scheduler.minutes = 0.0
    with contextlib.suppress(UserError, ArithmeticError):  # no end, or a cost per update that varies
        flops = training_flops(cfg, vocabulary_size)
        run.tokens_per_update, run.flops_per_update = flops.tokens_per_update, flops.per_update


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
