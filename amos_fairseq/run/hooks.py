"""Which hooks a run has, and how fairseq calls them.

``HOOKS`` lists the classes in the order in which each moment calls them. Each function below it replaces one of fairseq's:
it calls the hooks of the moment before, then fairseq's own function, then the hooks of the moment after. ``REPLACED`` lists
these functions; none is replaced twice. What is replaced only because of a fault of fairseq is in ``amos_fairseq.compat``.

A new hook is a class in the file of its topic and a line of ``HOOKS``, with the reason where its place matters. A new
moment is a method of ``amos_fairseq.run.hook.Hook``, called in the function of fairseq that reaches it.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException
from torch.utils.data._utils import signal_handling

from amos_fairseq.compat import device_reads, distribution, mixed_precision, patching
from amos_fairseq.compat.patching import Patch, Script, running_scripts
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.run import ending, schedule
from amos_fairseq.run.ending import SaveSettings, Signals
from amos_fairseq.run.graphs import Graphs
from amos_fairseq.run.health import Collapse, CollapseSettings, Divergence, DivergenceSettings, FiniteUpdates
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.kernels import Determinism, Kernels, Memory
from amos_fairseq.run.precision import Precision, PrecisionSettings
from amos_fairseq.run.progress import MetricsLog, Progress
from amos_fairseq.run.resume import Resume
from amos_fairseq.run.schedule import Epochs, Phases, TimeBudget
from amos_fairseq.setting_checks import check_config, check_configuration, check_flags

HOOKS: tuple[type[Hook], ...] = (
    Determinism,  # before anything computes on a GPU
    Epochs,  # before Resume, which refuses a run whose learning rate has ended
    Resume,  # before Precision, which reads the checkpoint that it repairs; may refuse a run before others note its loading
    Precision,
    Signals,
    Kernels,
    Graphs,
    FiniteUpdates,  # before Divergence: it names the loss, and a nan is no divergence
    Divergence,
    Collapse,
    MetricsLog,  # before Progress: it records what fairseq logs, to which Progress adds the time to the end
    Progress,
    TimeBudget,  # after Resume, where the time of a branch begins; after Signals: their saves are no part of an update's time
    Memory,
    Phases,  # after Signals, which may save: it ends the iterator over the epoch
)


@dataclass
class HookSettings(CollapseSettings, DivergenceSettings, SaveSettings, PrecisionSettings):
    """The settings of hooks, which users give as those of the task of pretraining."""


active: list[Hook] = []  # of the present run


def new_run() -> None:
    active[:] = [hook() for hook in HOOKS]


new_run()


def parse_args_and_arch(
    stock: Callable[..., Any], parser: Any, input_args: list[str] | None = None, *args: Any, **kwargs: Any
) -> Any:
    with report_user_errors():
        result = stock(parser, input_args, *args, **kwargs)
        flags = result if isinstance(result, Namespace) else result[0]
        check_flags(flags)
        mixed_precision.leave_tpu_to_its_flag(flags, sys.argv if input_args is None else input_args)
    return result


def add_defaults(stock: Callable[..., Any], cfg: Any) -> None:
    """Everything is registered and nothing is built. Under Hydra called in the command and again in each rank."""
    check_config(cfg)
    schedule.stop_at_time_limit(cfg)
    stock(cfg)


def call_main(stock: Callable[..., Any], cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
    """Launch the ranks of fairseq's training and validation commands, by flags or through Hydra.

    A user's mistake, now or later in any rank, becomes one line and an exit code instead of a traceback.
    """
    patching.patch_starting_scripts()
    with ending.exit_on_mistake():
        check_configuration(cfg)
        distribution.arrange_ranks(cfg)
        for hook in active:
            hook.before_launch(cfg)
    try:
        with ending.handled():
            stock(cfg, functools.partial(run_rank, main), **kwargs)
    except ProcessExitedException as ended:
        # A spawned rank has printed the reason; its exit code tells a scheduler whether to start the run again.
        sys.exit(ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code)


def run_rank(main: Callable[..., Any], cfg: Any, **kwargs: Any) -> None:
    """Run ``main`` in one rank. Unpickling this module-level function makes a spawned rank import the plugin first."""
    for hook in active:
        hook.before_rank(cfg)
    with ending.exit_on_mistake():
        try:
            main(cfg, **kwargs)
        except RuntimeError as error:
            distribution.explain_lost_connection(error)
            raise
        finally:
            patching.stop_readers()


def make_trainer(stock: Callable[..., Any], trainer: Trainer, cfg: Any, *args: Any, **kwargs: Any) -> None:
    new_run()
    distribution.check_connection(cfg)
    for hook in active:
        hook.before_trainer(cfg)
    patching.patch_training_script()
    stock(trainer, cfg, *args, **kwargs)
    for hook in active:
        hook.after_trainer(trainer)


def load_checkpoint(stock: Callable[..., Any], cfg: Any, trainer: Trainer, **kwargs: Any) -> tuple[Any, Any]:
    for hook in active:
        hook.before_load(cfg, trainer)
    try:
        extra_state, epoch_itr = stock(cfg, trainer, **kwargs)
        for hook in active:
            hook.after_load(cfg, trainer, epoch_itr, extra_state)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{cfg.restore_file} cannot be loaded ({reason}): it is damaged, or of another program; give another checkpoint"
        ) from error
    return extra_state, epoch_itr


def train_epoch(
    stock: Callable[..., Any], cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any
) -> tuple[list[float | None], bool]:
    if not all(hook.may_train(trainer, epoch_itr) for hook in active):
        return [None], True
    for hook in active:
        hook.before_epoch(cfg, trainer)
    should_stop = True
    try:
        # amos adapt compares its result with MODEL: a validation before the first update.
        if getattr(task.cfg, "started_from", None) and not trainer.get_num_updates():
            trainer.begin_epoch(epoch_itr.epoch)  # the model needs it before its first forward pass
            script = sys.modules[stock.__module__]  # of several names, see compat/patching.py
            script.validate(cfg, trainer, task, epoch_itr, cfg.dataset.valid_subset.split(","))
        valid_losses, should_stop = stock(cfg, trainer, task, epoch_itr)
    finally:
        for hook in active:
            hook.after_epoch(should_stop)
    if getattr(task, "phases", None) and not should_stop and not epoch_itr.end_of_epoch():
        valid_losses = [None]  # a phase has ended, and no epoch: the schedule takes note of no validation
    return valid_losses, should_stop


def make_bar(stock: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
    # Only fairseq's training script passes SAVE_DIR (under the name that Aim uses); other commands do not.
    directory = kwargs.get("aim_param_checkpoint_dir")
    if directory is None:
        return stock(iterator, *args, **kwargs)
    is_training = kwargs.get("prefix") is None  # for validation it holds the name of the subset
    if is_training:
        for hook in active:
            hook.before_bar(directory, iterator, kwargs)
    bar = stock(iterator, *args, **kwargs)
    return bar if distributed_utils.get_global_rank() else RunBar(bar, iterator, directory, is_training)


class RunBar(progress_bar.BaseProgressBar):
    """The bar of an epoch or a validation on the first rank: call the hooks of what it logs, then fairseq's bar."""

    def __init__(self, wrapped_bar: Any, iterator: Any, directory: str, is_training: bool) -> None:
        super().__init__(iterator)
        self.wrapped_bar, self.directory, self.is_training = wrapped_bar, directory, is_training

    def __iter__(self) -> Iterator[Any]:
        for samples in self.wrapped_bar:
            yield samples
            if self.is_training:
                for hook in active:
                    hook.before_next_batch()

    def log(self, stats: dict[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Log an interval of updates; fairseq logs nothing else here."""
        stats = dict(stats)
        for hook in active:
            hook.before_logging(self.directory, "train", step, stats)
        self.wrapped_bar.log(stats, tag=tag, step=step)

    def print(self, stats: dict[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Print a validation, or the averages of an epoch, for which there is no moment."""
        if tag != "train":
            for hook in active:
                hook.before_logging(self.directory, tag, step, stats)
        self.wrapped_bar.print(stats, tag=tag, step=step)

    def update_config(self, config: dict[str, Any]) -> None:
        self.wrapped_bar.update_config(config)


def train_step(stock: Callable[..., Any], trainer: Trainer, samples: list[Any], raise_oom: bool = True) -> Any:
    """Make an update; a batch that does not fit into memory ends the run, which is an option of fairseq's trainer."""
    for hook in active:
        hook.before_update(trainer)
    make_update = functools.partial(stock, trainer, samples, raise_oom)
    graphs = getattr(trainer, "graphed_updates", None)
    logged = make_update() if graphs is None else graphs.train_step(samples, make_update)
    for hook in active:
        hook.after_update(trainer, logged)
    return logged


def clip_grad_norm(stock: Callable[..., Any], trainer: Trainer, clip_norm: float) -> Tensor:
    try:
        norm = stock(trainer, clip_norm)
    except FloatingPointError as error:
        for hook in active:
            hook.scale_exhausted(trainer, error)
        raise
    return device_reads.keep_norm(norm)


def reduce_and_log_stats(
    stock: Callable[..., Any], trainer: Trainer, logging_outputs: Any, sample_size: Any, grad_norm: Tensor | None = None
) -> dict[str, Any]:
    """Read what the update logs, and its norm, from the device. Every update and every validation batch comes here."""
    read = device_reads.on_host((logging_outputs, sample_size, device_reads.true_norm(grad_norm)))
    logging_outputs, sample_size, norm = read
    device_reads.log_gradient_norm(trainer, norm)
    for hook in active:
        hook.before_statistics(trainer, norm, logging_outputs)
    return stock(trainer, logging_outputs, sample_size)


def save_checkpoint(stock: Callable[..., Any], cfg: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    saved = stock(cfg, trainer, *args, **kwargs) if all(hook.may_save(trainer) for hook in active) else None
    for hook in active:
        hook.after_save(trainer)
    return saved


def state_dict(stock: Callable[..., Any], trainer: Trainer) -> dict[str, Any]:
    state = stock(trainer)
    for hook in active:
        hook.before_save(trainer, state)
    return state


def validate_and_save(
    stock: Callable[..., Any], cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, *args: Any, **kwargs: Any
) -> tuple[list[float | None], bool]:
    settings = cfg
    # fairseq ends the run after this epoch: with intervals in updates, without a last validation and checkpoint.
    if args[-1:] == (True,) and epoch_itr.epoch == cfg.optimization.max_epoch:
        settings = OmegaConf.merge(cfg, {"optimization": {"max_update": trainer.get_num_updates()}})
    for hook in active:
        settings = hook.before_completion(settings, trainer)
    valid_losses, is_last = stock(settings, trainer, task, epoch_itr, *args, **kwargs)
    for hook in active:
        hook.update_completed(cfg, trainer, epoch_itr, is_last)
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
    Patch(JobReturn, "return_value", ending.report_mistake_of_job),
    Patch(signal_handling, "_set_worker_signal_handlers", ending.handle_in_loader_process),
)


def apply() -> None:
    """Replace fairseq's functions. Called once, after those of ``compat``."""
    if running_scripts():  # other programs keep their own hook
        sys.excepthook = ending.exception_hook
    patching.apply_patches(REPLACED)
