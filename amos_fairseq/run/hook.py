"""The moments of a run, as the methods of ``Hook``."""

from typing import Any

from fairseq.trainer import Trainer


class Hook:
    """Methods that are called at the moments of a run. A subclass overrides some of them, and keeps its state in attributes.

    Each trainer of fairseq gets new hooks. The methods are in the order in which a run reaches its moments. Every rank
    reaches them, unless stated otherwise: a collective operation would wait forever there.
    """

    def before_launch(self, cfg: Any) -> None:
        """All settings are known and no rank exists. Called in the process of the command only."""

    def before_rank(self, cfg: Any) -> None:
        """A rank starts. It is not connected with other ranks yet."""

    def before_trainer(self, cfg: Any) -> None:
        """The model exists."""

    def after_trainer(self, trainer: Trainer) -> None:
        """The trainer exists."""

    def before_load(self, cfg: Any, trainer: Trainer) -> None:
        """No checkpoint has been chosen or loaded yet. ``cfg``: the section ``checkpoint``."""

    def after_load(self, cfg: Any, trainer: Trainer, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
        """``extra_state``: that of the checkpoint; None if there is none."""

    def may_train(self, trainer: Trainer, epoch_itr: Any) -> bool:
        """Return whether to train an epoch. If a hook says no, the run ends."""
        return True

    def before_epoch(self, cfg: Any, trainer: Trainer) -> None: ...

    def before_bar(self, save_dir: str, batches: Any, settings: dict[str, Any]) -> None:
        """fairseq makes its bar of an epoch from ``settings``, which may be changed."""

    def before_update(self, trainer: Trainer) -> None: ...

    def scale_exhausted(self, trainer: Trainer, error: FloatingPointError) -> None:
        """``--fp16`` cannot lower its loss scale any more; afterwards fairseq's exception ends the run."""

    def before_statistics(self, trainer: Trainer, norm: float | None, outputs: list[dict[str, Any]]) -> None:
        """After the optimizer's step, before the update is logged; also for each validation batch, with the norm None.
        ``outputs``: the criterion's, on the CPU: of each micro-batch, or on several ranks one with the sums over all."""

    def after_update(self, trainer: Trainer, logged: dict[str, Any] | None) -> None:
        """Right after the optimizer's step and its statistics, before anything is validated or saved. ``logged``: means over
        all ranks; None after an overflow."""

    def before_logging(self, save_dir: str, split: str, update: int, values: dict[str, Any]) -> None:
        """fairseq prints the means of an interval of updates (``split`` is "train"; ``values`` may be changed) or a validation.
        First rank only."""

    def may_save(self, trainer: Trainer) -> bool:
        """Return whether to save the trainer. If a hook says no, it is not."""
        return True

    def before_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """``state`` is going to be a checkpoint. Only on ranks that save, usually the first: no collective operation."""

    def after_save(self, trainer: Trainer) -> None:
        """Called also if a hook has refused the save, so that a timed save is not due again at once."""

    def before_completion(self, cfg: Any, trainer: Trainer) -> Any:
        """Return the settings by which fairseq validates, saves and stops after this update: ``cfg``, or a changed copy."""
        return cfg

    def update_completed(self, cfg: Any, trainer: Trainer, epoch_itr: Any, is_last: bool) -> None:
        """After ``after_update``, and after validating and saving where they were due: here a run may stop."""

    def before_next_batch(self) -> None:
        """After all moments of an update. First rank only."""

    def after_epoch(self, should_stop: bool) -> None:
        """``should_stop``: the run ends, perhaps with an exception."""
