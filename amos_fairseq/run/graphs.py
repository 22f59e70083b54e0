"""``model.cuda_graphs``: an update is captured once as a CUDA graph, and then launched as a whole.

The operators of a small model take less time than the host needs to launch them: an update of ``electra_small`` has about
1,100. A graph launches them all at once. It repeats the launches that were captured, with the same addresses of memory and the
same Python values, so whatever changes from update to update is stored in a tensor:

    outside of the graph    the batch is copied into static tensors, the generator is seeded, the learning rates are copied to
                            the device; after it, the statistics are read
    in the graph            zero the gradients, forward and backward pass, sum into the masters, norm, clipping, Adam, cast to
                            16 bits, join the statistics into one vector

:meth:`GraphedUpdates.key` returns the Python values that can differ between batches: a graph is replayed for batches of its own
key, and all other batches take fairseq's path. A run with a Python value that changes with the number of the update is not
captured (:func:`refusal`).
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import Tensor

from amos_fairseq.compat import device_reads
from amos_fairseq.errors import UserError
from amos_fairseq.run.hook import Hook

logger = logging.getLogger(__name__)

# Updates of a key on fairseq's path before it is captured: they allocate the moments, and libraries choose their kernels.
WARM_UP = 3
INPUTS = ("tokens", "masked_tokens", "masked_positions", "masked_weights")


class CudaGraph:
    """What ``work`` does on the device; the tensors in ``result``, which it returned, are overwritten by each replay."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # "thread_local": fairseq's loader threads pin memory at the same time, which ends a capture of the mode "global".
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = work()

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


class Graphs(Hook):
    """``--cuda-graphs`` (``model.cuda_graphs``): give the trainer its ``graphed_updates``, or say why it has none."""

    def after_trainer(self, trainer: Trainer) -> None:
        if not OmegaConf.select(trainer.cfg, "model.cuda_graphs"):  # models outside this package have no such setting
            return
        if (reason := refusal(trainer)) is None:
            logger.info("updates of full batches become CUDA graphs, after %d of each kind", WARM_UP)
            trainer.graphed_updates = GraphedUpdates(trainer)
        elif trainer.is_data_parallel_master:
            logger.warning("model.cuda_graphs has no effect: no update is captured %s", reason)


def refusal(trainer: Trainer) -> str | None:
    """Return why no update of this run can be captured, to follow "no update is captured"; None if they can be."""
    cfg = trainer.cfg
    setting = lambda name: OmegaConf.select(cfg, name)  # noqa: E731
    reasons = {
        "on a CPU": not trainer.cuda,
        "with --fp16, whose loss scale the host needs: give --bf16": cfg.common.fp16,
        "on several ranks": trainer.data_parallel_world_size > 1,
        "with optimization.update_freq above 1": set(cfg.optimization.update_freq) != {1},
        "with common.empty_cache_freq": cfg.common.empty_cache_freq > 0,
        "for another task than text_pretraining": setting("task._name") != "text_pretraining",
        "with task.sample_break_mode other than none, whose blocks are padded": setting("task.sample_break_mode")
        != "none",
        "with another optimizer than grouped_adam": setting("optimizer._name") != "grouped_adam",
        "without bias correction (optimizer.bias_correction)": not setting("optimizer.bias_correction"),
        "with model.activation_checkpointing": setting("model.activation_checkpointing"),
        "with model.gumbel_entries=0": setting("model.gumbel_entries") == 0,
        "with model.generator_temperature_start": setting("model.generator_temperature_start"),
        "with model.mixture=layer_switch": setting("model.mixture") == "layer_switch",
        "with an average of the weights (ema.store_ema)": cfg.ema.store_ema,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class GraphedUpdates:
    """The updates of a run, of which those with the usual kind of batch are replayed.

    ``capture`` makes a graph of a function that takes no argument; ``replay()`` returns the result of that function.
    """

    def __init__(self, trainer: Trainer, capture: Callable[[Callable[[], Any]], Any] = CudaGraph) -> None:
        self.trainer, self.capture = trainer, capture
        self.positions = trainer.get_model().learned_positions()
        self.static: dict[str, Tensor] = {}  # the batch on the device
        self.rates: list[Tensor] = []  # the learning rate of each group of parameters on the device; none on a CPU
        self.graph: Any = None
        self.graph_key: Any = None
        self.last_key: Any = None
        self.number_of_key = 0  # updates in a row with last_key

    def key(self, sample: dict[str, Any]) -> Any:
        """Return the Python values that an update with this batch depends on; None for one that is never captured."""
        tokens = sample["net_input"]["tokens"] if sample else None
        if tokens is None or sample["ntokens"] < tokens.numel():  # a rank without data, or padding
            return None
        iterator = self.trainer.task.phase_iterator
        phase = None if iterator is None else iterator.phase
        return tokens.shape, sample["num_masked"], phase, [positions.period for positions in self.positions]

    def train_step(self, samples: list[Any], stock: Callable[[], Any]) -> Any:
        """Make an update, by a graph or by fairseq's ``train_step``, which is ``stock``."""
        key = self.key(samples[0])
        if key is None:
            return stock()
        self.number_of_key = self.number_of_key + 1 if key == self.last_key else 1
        self.last_key = key
        if key != self.graph_key:
            if self.number_of_key <= WARM_UP:
                return stock()
            self.graph = self.graph_key = None  # frees its memory
        return self.replay(samples[0], key)

    @metrics.aggregate("train")
    def replay(self, sample: dict[str, Any], key: Any) -> dict[str, Any]:
        """Do what fairseq's ``train_step`` does."""
        trainer = self.trainer
        metrics.log_start_time("train_wall", priority=800, round=0)
        sample = trainer.task.begin_step(sample, trainer.criterion, trainer.get_num_updates())
        if self.graph is None:
            self.make_graph(sample)
            self.graph_key = key
        for name, static in self.static.items():
            static.copy_(sample["net_input"][name], non_blocking=True)
        for rate, group in zip(self.rates, self.groups(), strict=False):
            rate.fill_(group["lr"])
        joined, layout = self.graph.replay()
        trainer.set_num_updates(trainer.get_num_updates() + 1)
        if trainer.cuda_env is not None:  # the hook Memory says when
            used = torch.cuda.max_memory_reserved() / 2**30  # not allocated: the memory of a graph is only reserved
            torch.cuda.reset_peak_memory_stats()
            free = trainer.cuda_env.total_memory_in_GB - used
            metrics.log_scalar("gb_free", free, priority=1500, round=1, weight=0)
        output, norm = device_reads.split([device_reads.fetch(tensor) for tensor in joined], layout)
        logged = trainer._reduce_and_log_stats([output], float(sample["num_masked"]), norm)
        metrics.log_stop_time("train_wall")
        return logged

    def groups(self) -> list[dict[str, Any]]:
        return self.trainer.optimizer.optimizer.param_groups

    def make_graph(self, sample: dict[str, Any]) -> None:
        """Capture an update of batches like ``sample``; raise UserError where PyTorch cannot."""
        device, groups = self.trainer.device, self.groups()
        self.static = {name: sample["net_input"][name].to(device, copy=True) for name in INPUTS}
        self.sample = sample | {"net_input": sample["net_input"] | self.static}
        if device.type == "cuda":  # on a CPU a function is called again in place of a graph, and reads the rates itself
            self.rates = [torch.zeros((), device=device) for _ in groups]
        before = [(group["lr"], group["capturable"]) for group in groups]
        try:
            for rate, group in zip(self.rates, groups, strict=False):
                group["lr"], group["capturable"] = rate, True
            self.graph = self.capture(self.update)
        except RuntimeError as error:
            # PyTorch's generator and allocator remain in the mode of a capture: this process cannot train on without a graph.
            # The end of a failed capture raises an error of its own, whose context is the cause.
            reason = str(error.__context__ or error).splitlines()[0]
            raise UserError(
                f"PyTorch cannot capture an update as a CUDA graph ({reason:.200}): train with model.cuda_graphs=false"
            ) from error
        finally:  # a checkpoint has numbers
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"], group["capturable"] = rate, capturable

    def update(self) -> tuple[list[Tensor], device_reads.Layout]:
        """Do what the graph contains; return what the host reads after it, and how to split that."""
        trainer = self.trainer
        trainer.criterion.train()
        trainer.zero_grad()
        sample = trainer._fp_convert_sample(self.sample)
        _, size, output = FairseqTask.train_step(
            trainer.task, sample, trainer.model, trainer.criterion, trainer.optimizer, trainer.get_num_updates()
        )
        trainer.optimizer.multiply_grads(1.0 / (float(size) or 1.0))
        norm = trainer.optimizer.clip_grad_norm(trainer.cfg.optimization.clip_norm)
        trainer.optimizer.step()
        return device_reads.join((output, norm))
