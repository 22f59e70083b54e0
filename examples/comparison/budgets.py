"""Convert equal budgets to numbers of updates, and choose the updates at which checkpoints are saved."""

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig

from amos_fairseq.errors import UserError

# Thesis Table 5.3: from "6.25 % trained" to the end.
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)
# All shares are multiples of a sixteenth.
PARTS = 16
MAX_LOG_INTERVAL = 50


@dataclass(frozen=True)
class Budget:
    """The budget of each entry.

    Attributes:
        kind: "updates"; "flops" of pretraining, as ``amos flops --reference`` counts them; or "minutes" of pretraining on this
            machine.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        unit = {"updates": "updates", "flops": "FLOPs", "minutes": "minutes"}[self.kind]
        return f"{self.amount:,.0f} {unit}" if self.amount < 1e6 else f"{self.amount:.3g} {unit}"

    def updates(self, flops_per_update: float, seconds_per_update: Callable[[], float]) -> float:
        """Return the updates that fit into the budget; ``seconds_per_update`` is measured only if needed."""
        if self.kind == "updates":
            return self.amount
        return self.amount / flops_per_update if self.kind == "flops" else self.amount * 60 / seconds_per_update()


def flops_per_update(cfg: DictConfig) -> float:
    """Count one update on the real model, criterion and batch; raise ``UserError`` if the cost changes between updates."""
    from amos_fairseq.flops import training_flops

    return float(training_flops(cfg, reference=True).per_update)


def share_name(share: float) -> str:
    """Return the folder name of a share: "0.0625", "1"."""
    return f"{share:g}"


def parse_shares(text: str) -> list[float]:
    """Parse "1,0.25" to [0.25, 1.0]; raise :class:`UserError` for unknown shares."""
    known = {share_name(share): share for share in SHARES}
    try:
        chosen = {share_name(float(word)) for word in text.split(",")}
    except ValueError:
        chosen = {text}
    if not chosen <= known.keys():
        raise UserError(
            f"--fine-tune-at {text}: give shares of the budget out of {','.join(known)}, separated by commas"
        )
    return [share for name, share in known.items() if name in chosen]


def update_at(max_update: int, share: float) -> int:
    return max_update * round(share * PARTS) // PARTS


def has_checkpoint_at_epoch_end(max_update: int, updates_per_epoch: int) -> bool:
    """Return whether a checkpoint of a share would be at the end of an epoch, where fairseq does not save by updates."""
    return any(update_at(max_update, share) % updates_per_epoch == 0 for share in SHARES[:-1])


def divisible_updates(budget: Budget, name: str, wanted: float, updates_per_epoch: int) -> int:
    """Return the number of updates nearest to ``wanted`` that is divisible into sixteenths with a checkpoint at each share.

    Raises:
        UserError: no near number is possible, or the user's own number of updates is not.
    """
    nearest = max(1, round(wanted / PARTS))
    nearby = [
        PARTS * parts
        for distance in range(4)
        for parts in sorted({nearest - distance, nearest + distance})
        if parts > 0
    ]
    possible = [number for number in nearby if not has_checkpoint_at_epoch_end(number, updates_per_epoch)]
    if not possible:
        raise UserError(
            f"{name}: an epoch of this text is {updates_per_epoch} updates, so a checkpoint at one of "
            f"{', '.join(f'{share:.2%}' for share in SHARES[:-1])} would be at its end, where fairseq saves none: give more "
            "text, or another dataset.batch_size with --set"
        )
    if budget.kind == "updates" and possible[0] != wanted:
        raise UserError(
            f"--budget-updates {wanted:,.0f} cannot be divided into sixteenths with a checkpoint at 1, 2, 4 and 8 of them (an "
            f"epoch is {updates_per_epoch} updates): give {possible[0]}"
        )
    if wanted < PARTS / 2:
        raise UserError(f"{name}: {budget} are {wanted:.1f} updates: give a budget of at least {PARTS} updates")
    return possible[0]


def schedule_settings(max_update: int, warmup_updates: int) -> dict[str, int]:
    """Return the Hydra keys of the schedule, with a checkpoint and a validation at every sixteenth of ``max_update``."""
    part = max_update // PARTS
    return {
        "optimization.max_update": max_update,
        "lr_scheduler.warmup_updates": warmup_updates,
        "checkpoint.save_interval_updates": part,
        "checkpoint.keep_interval_updates": -1,
        "dataset.validate_interval_updates": part,
        "common.log_interval": min(MAX_LOG_INTERVAL, max(1, part // 3)),
    }


def updates_per_epoch(cfg: DictConfig) -> int:
    """Return the complete updates of one process in an epoch of the training text (of its first shard).

    Raises:
        UserError: the text is missing, was binarized differently, or is smaller than one update.
    """
    from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

    task = TextPretrainingTask.setup_task(cfg.task)
    task.load_dataset(cfg.dataset.train_subset)
    update_freq = cfg.optimization.update_freq[0]
    iterator = task.get_batch_iterator(
        task.dataset(cfg.dataset.train_subset), max_tokens=cfg.dataset.max_tokens, max_sentences=cfg.dataset.batch_size
    )
    return len(iterator.frozen_batches) // update_freq
