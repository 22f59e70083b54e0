"""The pretraining of one entry: its command, how far it is, the checkpoints that stay."""

import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgets import SHARES, update_at
from entries import Entry, hydra_overrides
from omegaconf import DictConfig, OmegaConf
from pieces import Piece

from amos_fairseq.cli.runs import read_curves
from amos_fairseq.composition import RECIPES
from amos_fairseq.errors import UserError
from amos_fairseq.files import read_header
from amos_fairseq.finetuning.training import PACKAGE, environment, training_seconds
from amos_fairseq.metrics_file import read_records

# A checkpoint of a run must agree with its entry in these (None: in all); where either says nothing, an older or newer
# version of the package has no such setting.
COMPARED = {
    **dict.fromkeys(("task", "model", "criterion", "optimization", "optimizer", "lr_scheduler")),
    "dataset": ("batch_size", "max_tokens", "train_subset"),
    "common": ("seed", "bf16", "fp16", "amp"),
}
NOT_COMPARED = {"task.data", "task.save_dir", "task.tokenizer_directory"}
TIMED_UPDATES, TIMED_LINES = 48, 6


@dataclass(frozen=True)
class Pretraining:
    """One run.

    Attributes:
        cfg: what it is to be trained with, composed.
        settings: Hydra key -> value, beside those of the entry's config.
        save_dir: SAVE_DIR.
        device: "cpu" or "cuda:0".
    """

    entry: Entry
    cfg: DictConfig
    settings: dict[str, Any]
    save_dir: Path
    device: str

    @property
    def max_update(self) -> int:
        return int(self.cfg.optimization.max_update)

    @property
    def finished(self) -> bool:
        return self.num_updates >= self.max_update

    @property
    def num_updates(self) -> int:
        header = self._last_header()
        return int(header["optimizer_history"][-1]["num_updates"]) if header else 0

    def _last_header(self) -> dict[str, Any] | None:
        last = self.save_dir / "checkpoint_last.pt"
        return read_header(str(last)) if last.is_file() else None

    def checkpoint(self, share: float) -> Path | None:
        """The checkpoint at a share of the updates; None where it is not written yet."""
        found = sorted(self.save_dir.glob(f"checkpoint_*_{update_at(self.max_update, share)}.pt"))
        if found:
            return found[0]
        # At the end of an epoch fairseq writes none by updates.
        return self.save_dir / "checkpoint_last.pt" if share == 1.0 and self.finished else None

    def check(self) -> None:
        """Raise :class:`UserError` where SAVE_DIR holds a run of other settings."""
        header = self._last_header()
        saved = (header.get("cfg") or {}) if header else {}
        for group, keys in COMPARED.items():
            there = saved.get(group) or {}
            for key in sorted(there.keys() & self.cfg[group].keys() & set(keys or there)):
                here = OmegaConf.to_container(OmegaConf.create({"value": self.cfg[group][key]}))["value"]
                if f"{group}.{key}" not in NOT_COMPARED and not _equal(there[key], here):
                    raise UserError(
                        f"{self.save_dir} was trained with {group}.{key}={there[key]}, not {here}: give another OUT, or "
                        "remove that folder"
                    )

    def run(self, piece: Piece) -> None:
        """Train to the end of the budget, then remove what is not kept.

        Raises:
            Stopped: the piece has ended; the checkpoint is saved.
            RunFailed: it ended with an error.
        """
        command = hydra_command(self.entry, self.settings, self.save_dir, self.device)
        variables, start = environment(self.device, 1), self.num_updates
        try:
            piece.run(
                f"{self.entry.name}: pretraining", command, self.save_dir, variables, self.max_update,
                lambda updates: max(updates, start),
            )  # fmt: skip
        finally:
            self.prune()

    def prune(self) -> None:
        """Remove the checkpoints of other updates than the shares'."""
        kept = {update_at(self.max_update, share) for share in SHARES}
        for file in self.save_dir.glob("checkpoint_*_*.pt"):
            if int(file.stem.rsplit("_", 1)[1]) not in kept:
                file.unlink()

    def hours(self, share: float) -> float | None:
        """Of training so far at a kept checkpoint, validation and saving included, all parts of the run together."""
        file = self.checkpoint(share)
        return training_seconds(file) / 3600 if file else None

    def tokens_per_second(self) -> float | None:
        """Median over the logged intervals; None before the first."""
        speeds = logged_values(self.save_dir, "wps")
        return statistics.median(speeds) if speeds else None


def logged_values(save_dir: Path, key: str) -> list[float]:
    """Return the values that a run logged for its training intervals under ``key``."""
    values = [record.get(key) for record in read_records(save_dir) if record["split"] == "train"]
    return [value for value in values if value is not None]


def _equal(there: Any, here: Any) -> bool:
    if isinstance(there, (int, float)) and isinstance(here, (int, float)):
        return float(there) == float(here)
    return str(there) == str(here)


def hydra_command(entry: Entry, settings: dict[str, Any], save_dir: Path, device: str) -> list[str]:
    """One process of ``fairseq-hydra-train``; typed again it continues."""
    own = {
        "checkpoint.save_dir": str(save_dir),
        "common.user_dir": str(PACKAGE),
        "common.cpu": device == "cpu",
        # One process, whatever the machine has: the settings are those of one.
        "distributed_training.distributed_world_size": 1,
    }
    command = [sys.executable, "-W", "ignore", "-m", "fairseq_cli.hydra_train", "--config-dir", str(RECIPES)]
    return [*command, "--config-name", entry.config, *hydra_overrides(settings | own)]


def measure_seconds_per_update(
    entry: Entry, settings: dict[str, Any], directory: Path, device: str, piece: Piece
) -> float:
    """Train some updates that nobody keeps, and see how long one takes: the median of the logged intervals but the first.

    Raises:
        Stopped: the piece has ended.
        RunFailed: it ended with an error.
    """
    timed = settings | {
        "optimization.max_update": TIMED_UPDATES,
        "lr_scheduler.warmup_updates": 1,
        "common.log_interval": TIMED_UPDATES // TIMED_LINES,
        "checkpoint.no_save": True,
        "dataset.disable_validation": True,
    }
    command = hydra_command(entry, timed, directory, device)
    piece.run(
        f"{entry.name}: timing", command, directory, environment(device, 1), TIMED_UPDATES, lambda updates: updates
    )
    tokens, batches = (logged_values(directory, key)[-(TIMED_LINES - 1) :] for key in ("wps", "wpb"))
    return statistics.median(batch / per_second for batch, per_second in zip(batches, tokens, strict=True))


def threads() -> str:
    """Threads of a training on the CPU: part of what its hours mean."""
    return os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
