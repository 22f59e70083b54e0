"""What happens at each moment of a run, and in which order.

:data:`HOOKS` is the table. Each function below it replaces one of fairseq's and reads: the hooks of the moment before,
fairseq's own function, the hooks of the moment after. :data:`REPLACED` lists them; no function is replaced twice.

A new hook is a small function with the arguments of its moment, in the file of its topic: in this folder, or in ``compat`` if a
fixed fairseq would not need it. Add it to the list of its moment here, with the reason where its place matters. A new moment
is a line of the table and an ``at("moment", ...)`` in the function of fairseq that reaches it; if none of the functions below
does, replace one more in :data:`REPLACED`. What is replaced only because of a fault is in :mod:`amos_fairseq.compat`.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from hydra.core.utils import JobReturn
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException
from torch.utils.data._utils import signal_handling

from amos_fairseq.compat import checkpoints, device_reads, distribution, mixed_precision, patching, prefetching
from amos_fairseq.compat.patching import Patch, Script
from amos_fairseq.errors import report_user_errors
from amos_fairseq.run import (
    collapse,
    compilation,
    console,
    determinism,
    device,
    divergence,
    failed_updates,
    metrics_log,
    mistakes,
    names,
    precision,
    progress,
    resume,
    save_dir,
    signals,
)
from amos_fairseq.setting_checks import check_configuration

Stock = Callable[..., Any]  # fairseq's own function

# Moment -> its hooks in their order. The comment above a moment has their arguments. Every rank reaches it, unless the comment
# says otherwise: there a collective operation would wait forever.
HOOKS: dict[str, tuple[Callable[..., Any], ...]] = {
    # Once in the process of the command.
    # flags, the words of the command line
    "flags_parsed": (names.check_flags, mixed_precision.leave_tpu_to_its_flag),
    # cfg; under Hydra, and again in each rank: everything is registered and nothing is built
    "before_defaults": (names.check_config, save_dir.separate_jobs),
    # cfg; no rank exists
    "before_launch": (
        check_configuration,
        precision.check_settings,
        distribution.arrange_ranks,
        distribution.isolate_ranks,
        progress.announce,  # the number of ranks is known
        device.advise_passive_threads,
    ),
    #
    # In each rank, once.
    # cfg
    "before_rank": (console.quiet_console, device.keep_memory),
    # cfg; the model exists
    "before_trainer": (
        determinism.use_deterministic_kernels,  # first: before anything computes on a GPU
        distribution.check_connection,
        precision.choose_precision,  # the first that needs the other ranks
        distribution.check_exchange,  # the precision is known
        patching.patch_training_script,
        signals.install_handlers,
    ),
    # trainer
    "after_trainer": (compilation.prepare_kernels, failed_updates.collect_outputs),
    # checkpoint settings, trainer
    "before_load": (
        save_dir.claim,  # first: no other run writes there during the repair
        checkpoints.repair,  # before anything else loads checkpoint_last.pt
        resume.check_checkpoint,
    ),
    # checkpoint settings, trainer, epoch iterator, extra state of the checkpoint
    "after_load": (
        resume.check_run,  # first: a run that is refused notes nothing
        metrics_log.note_resumed_update,
        divergence.load_recent_updates,
        collapse.load_count,
        progress.announce_cost,
    ),
    #
    # In each epoch.
    # trainer, epoch iterator -> whether to train it; if any says no, the run ends
    "may_train": (resume.is_unfinished,),
    # cfg, trainer
    "before_epoch": (signals.finish_updates, progress.start_epoch),
    # settings of fairseq's bar of an epoch
    "before_bar": (progress.replace_bar,),
    # SAVE_DIR, epoch, its iterator
    "new_epoch_bar": (metrics_log.follow_epoch,),
    #
    # In each update.
    # trainer
    "before_update": (failed_updates.forget_outputs, compilation.start_clock),
    # trainer, norm of the gradient on its device, before the optimizer's step
    "after_gradient": (failed_updates.check_amp_gradient,),
    # trainer, norm on the host, after the step; also for each validation batch, with None
    "before_statistics": (device_reads.log_gradient_norm, failed_updates.check_gradient),
    # trainer, logged values; None after an overflow
    "after_update": (
        failed_updates.check_logged_losses,  # first: it names the loss, and a nan is no divergence
        divergence.stop_if_diverging,
        collapse.watch_discriminator,
        names.check_best_metric,
        compilation.log_compilation,
    ),
    # SAVE_DIR, "train", update, logged values. First rank only
    "interval_logged": (
        metrics_log.append_record,  # first: it records what fairseq logs
        progress.show_interval,
    ),
    # SAVE_DIR, subset, update, logged values. First rank only
    "validation_logged": (metrics_log.append_record,),
    # trainer -> whether to save it
    "may_save": (divergence.is_unsuspicious,),
    # trainer, state. Only on ranks that save, usually the first: no collective operation
    "state_to_save": (checkpoints.keep_last_history, divergence.save_recent_updates, collapse.save_count),
    # trainer; also where it may not be saved, so that a timed save is not due again at once
    "after_save": (signals.record_last_save,),
    # cfg, trainer, epoch iterator, whether it was the last; after validation and saving, where due
    "update_completed": (signals.stop_after_update,),
    # no argument; after all moments of the update. First rank only
    "before_next_batch": (progress.count_update,),
    # whether the run ends
    "after_epoch": (progress.end_epoch,),
    #
    # At the end of each rank.
    "after_rank": (prefetching.stop_readers,),
}


def at(moment: str, *arguments: Any) -> list[Any]:
    """Call the hooks of a moment in their order, and return what they return."""
    return [hook(*arguments) for hook in HOOKS[moment]]


def parse_args_and_arch(
    stock: Stock, parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any
) -> Any:
    with report_user_errors():
        with mixed_precision.one_precision():
            result = stock(parser, input_args, *args, **kwargs)
        flags = result if isinstance(result, Namespace) else result[0]
        at("flags_parsed", flags, sys.argv if input_args is None else input_args)
    return result


def add_defaults(stock: Stock, cfg: Any) -> None:
    at("before_defaults", cfg)
    stock(cfg)


def call_main(stock: Stock, cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
    """Launch the ranks of fairseq's training and validation commands, by flags or through Hydra.

    A user's mistake, now or later in any rank, becomes one line and an exit code instead of a traceback.
    """
    patching.patch_starting_scripts()
    with report_user_errors():
        at("before_launch", cfg)
    try:
        with signals.handled():
            stock(cfg, functools.partial(run_rank, main), **kwargs)
    except ProcessExitedException as ended:
        # A spawned rank has printed the reason; its exit code tells a scheduler whether to start the run again.
        sys.exit(ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code)


def run_rank(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> None:
    """Run ``main`` in one rank. Unpickling this module-level function makes a spawned rank import the plugin first."""
    at("before_rank", cfg)
    with mistakes.exit_on_mistake():
        try:
            main(cfg, **kwargs)
        except RuntimeError as error:
            distribution.name_lost_ranks(error)
            raise
        finally:
            at("after_rank")


def make_trainer(stock: Stock, trainer: Trainer, cfg: Any, *args: Any, **kwargs: Any) -> None:
    at("before_trainer", cfg)
    stock(trainer, cfg, *args, **kwargs)
    at("after_trainer", trainer)


def load_checkpoint(stock: Stock, cfg: Any, trainer: Trainer, **kwargs: Any) -> tuple[Any, Any]:
    at("before_load", cfg, trainer)
    extra_state, epoch_itr = stock(cfg, trainer, **kwargs)
    at("after_load", cfg, trainer, epoch_itr, extra_state)
    return extra_state, epoch_itr


def train_epoch(stock: Stock, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any) -> tuple[list[float | None], bool]:
    if not all(at("may_train", trainer, epoch_itr)):
        return [None], True
    at("before_epoch", cfg, trainer)
    should_stop = True
    try:
        valid_losses, should_stop = stock(cfg, trainer, task, epoch_itr)
    finally:
        at("after_epoch", should_stop)
    return valid_losses, should_stop


def make_bar(stock: Stock, iterator: Any, *args: Any, **kwargs: Any) -> Any:
    # Only fairseq's training script passes SAVE_DIR (under the name that Aim uses); other commands do not.
    directory = kwargs.get("aim_param_checkpoint_dir")
    if directory is None:
        return stock(iterator, *args, **kwargs)
    is_training = kwargs.get("prefix") is None  # for validation it holds the name of the subset
    if is_training:
        at("before_bar", kwargs)
    bar = stock(iterator, *args, **kwargs)
    if is_training:
        at("new_epoch_bar", directory, kwargs["epoch"], iterator)
    is_first_rank = distributed_utils.get_global_rank() == 0
    return RunBar(bar, iterator, directory, is_training) if is_first_rank else bar


class RunBar(progress_bar.BaseProgressBar):
    """The bar of an epoch or a validation on the first rank: call the hooks of what it logs, then fairseq's bar."""

    def __init__(self, wrapped_bar: Any, iterator: Any, directory: str, is_training: bool) -> None:
        self.wrapped_bar, self.iterator = wrapped_bar, iterator
        self.directory, self.is_training = directory, is_training

    def __len__(self) -> int:
        return len(self.iterator)

    def __iter__(self) -> Iterator[Any]:
        for samples in self.wrapped_bar:
            yield samples
            if self.is_training:
                at("before_next_batch")

    def log(self, stats: dict[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Log an interval of updates; fairseq logs nothing else here."""
        stats = dict(stats)
        at("interval_logged", self.directory, "train", step, stats)
        self.wrapped_bar.log(stats, tag=tag, step=step)

    def print(self, stats: dict[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Print a validation, or the averages of an epoch, for which there is no moment."""
        if tag != "train":
            at("validation_logged", self.directory, tag, step, stats)
        self.wrapped_bar.print(stats, tag=tag, step=step)

    def update_config(self, config: dict[str, Any]) -> None:
        self.wrapped_bar.update_config(config)


def train_step(stock: Stock, trainer: Trainer, samples: list[Any], raise_oom: bool = True) -> Any:
    """Make an update; a batch that does not fit into memory ends the run, which is an option of fairseq's trainer."""
    at("before_update", trainer)
    logged = stock(trainer, samples, raise_oom)
    at("after_update", trainer, logged)
    return logged


def clip_grad_norm(stock: Stock, trainer: Trainer, clip_norm: float) -> Tensor:
    try:
        norm = stock(trainer, clip_norm)
    except FloatingPointError as error:
        failed_updates.stop_at_smallest_scale(trainer, error)
        raise
    at("after_gradient", trainer, norm)
    return device_reads.keep_norm(trainer, norm)


def reduce_and_log_stats(
    stock: Stock, trainer: Trainer, logging_outputs: Any, sample_size: Any, grad_norm: Tensor | None = None
) -> dict[str, Any]:
    logging_outputs, sample_size, norm = device_reads.read_statistics(trainer, logging_outputs, sample_size, grad_norm)
    at("before_statistics", trainer, norm)
    return stock(trainer, logging_outputs, sample_size)


def save_checkpoint(stock: Stock, cfg: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    saved = stock(cfg, trainer, *args, **kwargs) if all(at("may_save", trainer)) else None
    at("after_save", trainer)
    return saved


def state_dict(stock: Stock, trainer: Trainer) -> dict[str, Any]:
    state = stock(trainer)
    at("state_to_save", trainer, state)
    return state


def validate_and_save(
    stock: Stock, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, *args: Any, **kwargs: Any
) -> tuple[list[float | None], bool]:
    valid_losses, is_last = stock(cfg, trainer, task, epoch_itr, *args, **kwargs)
    at("update_completed", cfg, trainer, epoch_itr, is_last)
    return valid_losses, is_last


REPLACED = (
    Patch(options, "parse_args_and_arch", parse_args_and_arch),
    Patch(Script.STARTING, "add_defaults", add_defaults),
    Patch(distributed_utils, "call_main", call_main),
    Patch(Trainer, "__init__", make_trainer),
    Patch(checkpoint_utils, "load_checkpoint", load_checkpoint),
    Patch(Script.TRAINING, "train", train_epoch),
    Patch(progress_bar, "progress_bar", make_bar),
    Patch(Trainer, "train_step", train_step),
    Patch(Trainer, "clip_grad_norm", clip_grad_norm),
    Patch(Trainer, "_reduce_and_log_stats", reduce_and_log_stats),
    Patch(checkpoint_utils, "save_checkpoint", save_checkpoint),
    Patch(Trainer, "state_dict", state_dict),
    Patch(Script.TRAINING, "validate_and_save", validate_and_save),
    # Without a moment: each of these has one reason to be replaced.
    Patch(JobReturn, "return_value", mistakes.report_mistake_of_job),
    Patch(checkpoint_utils, "verify_checkpoint_directory", save_dir.leave_to_claim),
    Patch(signal_handling, "_set_worker_signal_handlers", signals.handle_in_loader_process),
)


def apply() -> None:
    """Replace fairseq's functions. Called once, after those of ``compat``."""
    mistakes.install_exception_hook()
    patching.apply_patches(REPLACED)
