"""Equal budgets, made into numbers of updates, and the points on the way at which checkpoints are kept."""

from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig

from amos_fairseq.errors import UserError

# Thesis Table 5.3: "6.25 % trained" to the end.
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0)
# All of them are multiples of a sixteenth.
PARTS = 16
MOST_UPDATES_BETWEEN_LINES = 50


@dataclass(frozen=True)
class Budget:
    """What every entry may spend.

    Attributes:
        kind: "updates"; "flops" of pretraining, counted as thesis 5.2.2 does; or "minutes" of pretraining here.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        unit = {"updates": "updates", "flops": "FLOPs", "minutes": "minutes"}[self.kind]
        return f"{self.amount:,.0f} {unit}" if self.amount < 1e6 else f"{self.amount:.3g} {unit}"

    def updates(self, flops_per_update: float, seconds_per_update: Callable[[], float]) -> float:
        """Updates that the budget pays for; ``seconds_per_update`` is measured only where it is needed."""
        if self.kind == "updates":
            return self.amount
        return self.amount / flops_per_update if self.kind == "flops" else self.amount * 60 / seconds_per_update()


def share_name(share: float) -> str:
    """Of a folder: "0.0625", "1"."""
    return f"{share:g}"


def parse_shares(text: str) -> list[float]:
    """ "1,0.25" -> [0.25, 1.0]; raises :class:`UserError`."""
    known = {share_name(share): share for share in SHARES}
    try:
        chosen = {share_name(float(word)) for word in text.split(",")}
    except ValueError:
        chosen = {text}
    if not chosen <= known.keys():
        raise UserError(
            f"--fine-tune-at {text}: give shares of the budget out of {','.join(known)}, with commas between"
        )
    return [share for name, share in known.items() if name in chosen]


def update_at(max_update: int, share: float) -> int:
    return max_update * round(share * PARTS) // PARTS


def ends_epochs(max_update: int, updates_per_epoch: int) -> bool:
    """Whether a kept checkpoint before the last would fall on the end of an epoch, where fairseq writes none by updates."""
    return any(update_at(max_update, share) % updates_per_epoch == 0 for share in SHARES[:-1])


def whole_updates(budget: Budget, name: str, wanted: float, updates_per_epoch: int) -> int:
    """The number of updates nearest to ``wanted`` that can be cut into sixteenths with a checkpoint at each.

    Raises:
        UserError: there is none near, or the user's own number of updates is none.
    """
    nearest = max(1, round(wanted / PARTS))
    nearby = [
        PARTS * parts
        for distance in range(4)
        for parts in sorted({nearest - distance, nearest + distance})
        if parts > 0
    ]
    possible = [number for number in nearby if not ends_epochs(number, updates_per_epoch)]
    if not possible:
        raise UserError(
            f"{name}: an epoch of this text is {updates_per_epoch} updates, so that a checkpoint at one of "
            f"{', '.join(f'{share:.2%}' for share in SHARES[:-1])} would fall on its end, where fairseq writes none: give "
            "more text, or another dataset.batch_size with --set"
        )
    if budget.kind == "updates" and possible[0] != wanted:
        raise UserError(
            f"--budget-updates {wanted:,.0f} cannot be cut into sixteenths with a checkpoint at 1, 2, 4 and 8 of them (an "
            f"epoch is {updates_per_epoch} updates): give {possible[0]}"
        )
    if wanted < PARTS / 2:
        raise UserError(f"{name}: {budget} are {wanted:.1f} updates: give a budget of at least {PARTS} updates")
    return possible[0]


def schedule_settings(max_update: int, warmup_share: float) -> dict[str, int]:
    """Hydra keys of a run of ``max_update`` updates: its schedule, and a checkpoint and a validation at every sixteenth."""
    part = max_update // PARTS
    return {
        "optimization.max_update": max_update,
        "lr_scheduler.warmup_updates": max(1, round(max_update * warmup_share)),
        "checkpoint.save_interval_updates": part,
        "checkpoint.keep_interval_updates": -1,
        "dataset.validate_interval_updates": part,
        "common.log_interval": min(MOST_UPDATES_BETWEEN_LINES, max(1, part // 3)),
    }


def updates_per_epoch(cfg: DictConfig) -> int:
    """Whole updates of one process in an epoch of the training text (of its first shard).

    Raises:
        UserError: the text is missing, was binarized otherwise, or is smaller than one update.
    """
    from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

    task = TextPretrainingTask.setup_task(cfg.task)
    task.load_dataset(cfg.dataset.train_subset)
    update_freq = cfg.optimization.update_freq[0]
    iterator = task.get_batch_iterator(
        task.dataset(cfg.dataset.train_subset), max_tokens=cfg.dataset.max_tokens, max_sentences=cfg.dataset.batch_size
    )
    return len(iterator.frozen_batches) // update_freq
