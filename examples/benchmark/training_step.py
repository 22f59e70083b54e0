"""What is measured here: a training step as fairseq's own trainer makes it, on random tokens, and its memory."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

# ruff: noqa: E402
# isort: off
import amos_fairseq

amos_fairseq.register()  # before fairseq is imported here, whose logging it keeps quiet

# isort: on
import numpy as np
import torch
from fairseq import models
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from amos_fairseq.compat.mixed_precision import master_weights
from amos_fairseq.data.block_iterator import blocks_per_batch
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.errors import UserError
from amos_fairseq.flops import build_task, read_configuration
from amos_fairseq.run.precision import FLAGS, set_precision
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

Batch = dict[str, Any]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A measured step is one micro-batch on one device, so these settings cannot be chosen.
FIXED = ("optimization.update_freq", "distributed_training.distributed_world_size")


@dataclass(frozen=True)
class Setup:
    """A configuration that is ready to be measured.

    Attributes:
        cfg: configuration with one micro-batch per update, one rank, and the chosen precision and device.
        vocabulary_size: number of dictionary entries; None: that of ``task.data``.
        precision: a key of :data:`DTYPES`.
    """

    cfg: DictConfig
    vocabulary_size: int | None
    task: TextPretrainingTask
    device: torch.device
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def batch_size(self) -> int:
        """Number of sequences in a micro-batch."""
        dataset, length = self.cfg.dataset, self.cfg.task.tokens_per_sample
        return blocks_per_batch(length, dataset.max_tokens, dataset.batch_size, self.cfg.model.max_positions)


def set_up(
    config: str,
    overrides: Sequence[str] = (),
    precision: str | None = None,
    device: str | None = None,
    vocabulary_size: int | None = None,
) -> Setup:
    """Read a configuration (:func:`~amos_fairseq.flops.read_configuration`) and adapt it to this machine.

    Args:
        precision: a key of :data:`DTYPES`; None takes the recipe's.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        vocabulary_size: number of dictionary entries; None takes the recipe's.
    """
    for name in FIXED:
        if any(override.lstrip("+").startswith(f"{name}=") for override in overrides):
            raise UserError(f"--set {name}=... has no effect: a step is one micro-batch on one device; remove it")
    chosen = choose_device(device)
    cfg, configured_size = read_configuration(config, overrides)
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task is {cfg.task._name}: a pretraining step is measured (text_pretraining)")
    cfg.optimization.update_freq = [1]
    cfg.distributed_training.distributed_world_size = 1
    cfg.common.cpu = chosen.type == "cpu"
    if precision is not None:
        cfg.task.precision = precision
        cfg.common.update(dict.fromkeys(FLAGS, False))
    precision = set_precision(cfg, on_gpu=chosen.type == "cuda")
    vocabulary_size = configured_size if vocabulary_size is None else vocabulary_size
    return Setup(cfg, vocabulary_size, build_task(cfg.task, vocabulary_size), chosen, precision)


def choose_device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here; remove the flag or give --device cpu")
    return torch.device(name or ("cuda" if has_gpu else "cpu"))


class UnsavedTrainer(Trainer):
    """fairseq's trainer without the ``crash.pt`` of a failed step, because there is no run to inspect."""

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Save nothing."""


class FairseqStep:
    """A model of this package with its criterion, optimizer, schedule, clipping, precision and logging.

    The gradient exchange of a real update is missing on one rank (for several, see rank_traces.py).
    """

    def __init__(self, setup: Setup):
        torch.manual_seed(setup.cfg.common.seed)
        model = models.build_model(setup.cfg.model, setup.task)
        if model.awaits_token_counts:
            model.set_token_counts(synthetic_counts(setup.task))
        self.trainer = UnsavedTrainer(setup.cfg, setup.task, model, setup.task.build_criterion(setup.cfg.criterion))

    @property
    def module(self) -> nn.Module:
        return self.trainer.get_model()

    @property
    def criterion(self) -> nn.Module:
        return self.trainer.get_criterion()

    def step(self, batch: Batch) -> None:
        """Run forward, backward, clipping, optimizer, schedule and statistics."""
        self.update([batch])

    def update(self, micro_batches: Sequence[Batch]) -> None:
        """Run a step with the accumulated gradients of several micro-batches."""
        with metrics.aggregate(new_root=True):  # separate from the statistics of other models
            self.trainer.train_step(micro_batches)

    def state(self) -> Iterator[Tensor]:
        """Yield what is held between two steps: weights, gradients, buffers, master weights, moments."""
        yield from tensors_of(self.module)
        optimizer = self.trainer.optimizer
        if hasattr(optimizer, "fp32_params"):
            yield from master_weights(optimizer)
        yield from moments_of(optimizer.optimizer)


class EagerGraph:
    """Takes the place of :class:`amos_fairseq.run.graphs.CudaGraph` on a CPU: it calls the captured function again.

    That is what a graph does, as far as the Python values of the function are those of its capture.
    """

    replays = 0

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def replay(self) -> Any:
        type(self).replays += 1
        return self.work()


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, their gradients, and buffers."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the state of the optimizer, and the gradients of its own parameters (master weights)."""
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def synthetic_counts(task: TextPretrainingTask) -> Tensor:
    """Return token counts for a generator that samples by frequency: the dictionary's, 0 for special tokens."""
    counts = torch.tensor(task.dictionary.count)
    counts[task.special_ids] = 0
    return counts


def random_batches(setup: Setup, number: int = 4) -> list[Batch]:
    """Make batches of full blocks of random tokens, equal for equal ``common.seed``, as a loader process returns them."""
    size = setup.batch_size
    dataset = random_blocks(setup.task, number * size)
    return [collate(dataset, range(start, start + size)) for start in range(0, number * size, size)]


def random_blocks(task: TextPretrainingTask, number: int) -> MaskedBlockDataset:
    """Return ``number`` full blocks of non-special tokens, sampled uniformly."""
    generator = np.random.default_rng(task.cfg.seed)
    special = set(task.special_ids)
    pieces = np.array([index for index in range(len(task.dictionary)) if index not in special])
    tokens = generator.choice(pieces, size=(number, task.cfg.tokens_per_sample - 1))
    return task.mask_blocks(list(torch.from_numpy(tokens)), training=True, source="synthetic text")


def collate(dataset: MaskedBlockDataset, indices: range | np.ndarray) -> Batch:
    return dataset.collater([dataset[index] for index in indices])


def loaded_tokens_per_second(setup: Setup, batches: int = 16) -> float:
    """Return the speed of one loader process: masking and collation, and the reading of ``task.data`` if that is set."""
    size = setup.batch_size
    if setup.vocabulary_size is None:
        setup.task.load_dataset(setup.cfg.dataset.train_subset)
        dataset = setup.task.dataset(setup.cfg.dataset.train_subset)
    else:
        dataset = random_blocks(setup.task, 4 * size)
    order = np.resize(dataset.ordered_indices(), (1 + batches) * size).reshape(-1, size)
    collate(dataset, order[0])
    start = time.perf_counter()
    tokens = sum(collate(dataset, indices)["ntokens"] for indices in order[1:])
    return tokens / (time.perf_counter() - start)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that operators create while this mode is active, as long as the tensors live.

    PyTorch does not count CPU memory. Scratch memory inside an operator and older tensors are not counted.

    Attributes:
        now: bytes alive.
        peak: maximum of ``now``.
        largest: bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in tree_iter((args, kwargs)):  # an older tensor is not counted when an operator returns it
            if isinstance(argument, Tensor):
                self._note(argument.untyped_storage(), is_new=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage(), is_new=True)
        return result

    def _note(self, storage: torch.UntypedStorage, is_new: bool) -> None:
        if id(storage) in self._known:
            return
        size = storage.nbytes() if is_new else 0
        self._known.add(id(storage))
        weakref.finalize(storage, self._forget, id(storage), size).atexit = False
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


def step_peak(step: Callable[[], None], device: torch.device) -> int:
    """Return the maximum number of bytes that ``step`` allocates in addition to those allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        # fairseq's trainer resets the peak at the end of each step, before it could be read here.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            step()
            torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        step()
    return live.peak


def held_bytes(*tensors: Tensor) -> int:
    """Return the total bytes of the storages of the tensors; a shared storage counts once."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
