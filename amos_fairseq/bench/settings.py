"""Settings of ``amos bench`` and the configuration that it measures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf

from amos_fairseq.data.block_iterator import blocks_per_batch
from amos_fairseq.errors import UserError
from amos_fairseq.flops.recipe import read_configuration
from amos_fairseq.run.precision import choose_precision

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A measured step is one micro-batch on one device, so these settings cannot be chosen.
FIXED = ("optimization.update_freq", "distributed_training.distributed_world_size")


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``amos bench``.

    Attributes:
        config: source of the configuration, see :func:`read_configuration`.
        overrides: ``KEY=VALUE`` settings.
        peers: names from :data:`amos_fairseq.bench.contest.PEERS`, in the order of the table.
        precision: a key of :data:`DTYPES`; None takes the recipe's.
        steps, warmup: measured and unmeasured steps of each contestant.
        threads: number of CPU threads; None takes PyTorch's default.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        vocabulary_size: number of dictionary entries; None takes that of ``task.data`` or of the checkpoint.
        compile: also measure every contestant under ``torch.compile``.
        pieces: also time attention, output layer, sampling and optimizer separately.
    """

    config: str
    overrides: Sequence[str] = ()
    peers: Sequence[str] = ()
    precision: str | None = None
    steps: int = 20
    warmup: int = 5
    threads: int | None = None
    device: str | None = None
    vocabulary_size: int | None = None
    compile: bool = False
    pieces: bool = False

    @property
    def recipe_name(self) -> str:
        """Name of the configuration without folder and suffix, for file names."""
        return self.config.rstrip("/").split("/")[-1].removesuffix(".yaml").removesuffix(".pt")


@dataclass(frozen=True)
class Setup:
    """A configuration that is ready to be measured.

    Attributes:
        cfg: configuration with one micro-batch per update, one rank, and the chosen precision and device.
        vocabulary_size: number of dictionary entries; None reads the dictionary of ``task.data``.
        precision: a key of :data:`DTYPES`.
    """

    cfg: DictConfig
    vocabulary_size: int | None
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

    def with_model(self, **settings: str | bool) -> "Setup":
        """Return a copy with other model settings."""
        cfg = self.cfg.copy()
        cfg.model.update(settings)
        return Setup(cfg, self.vocabulary_size, self.device, self.precision)


def prepare(settings: BenchSettings, default_vocabulary: int) -> Setup:
    """Read the configuration and adapt it to this machine.

    Args:
        default_vocabulary: vocabulary size of a recipe without data, unless ``settings`` give one.

    Raises:
        UserError: a value is out of range, the device or precision is not available, or the task is not pretraining.
    """
    check_values(settings)
    device = choose_device(settings.device)
    cfg, saved_size = read_configuration(settings.config, settings.overrides)
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task is {cfg.task._name}: amos bench measures pretraining steps (text_pretraining)")
    cfg.optimization.update_freq = [1]
    cfg.distributed_training.distributed_world_size = 1
    cfg.common.cpu = device.type == "cpu"
    precision = settings.precision or recipe_precision(cfg)
    cfg.common.bf16, cfg.common.fp16, cfg.common.amp = precision == "bf16", precision == "fp16", False
    choose_precision(cfg, has_gpu=device.type == "cuda")
    size = settings.vocabulary_size if settings.vocabulary_size is not None else saved_size
    if size is None and OmegaConf.is_missing(cfg.task, "data"):
        size = default_vocabulary
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return Setup(cfg, size, device, precision)


def check_values(settings: BenchSettings) -> None:
    """Raise :class:`UserError` for values out of range and for overrides of :data:`FIXED` settings."""
    for name, minimum in (("steps", 1), ("warmup", 0), ("threads", 1)):
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name} {value} must be at least {minimum}")
    for name in FIXED:
        if any(override.lstrip("+").startswith(f"{name}=") for override in settings.overrides):
            raise UserError(f"--set {name}=... has no effect: a step is one micro-batch on one device; remove it")


def choose_device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here; remove the flag or give --device cpu")
    return torch.device(name or ("cuda" if has_gpu else "cpu"))


def recipe_precision(cfg: DictConfig) -> str:
    """Return the precision that the recipe trains in; raise :class:`UserError` for ``common.amp``."""
    if cfg.common.amp:
        raise UserError("common.amp=true cannot be measured: give --precision float32, bf16 or fp16")
    return "bf16" if cfg.common.bf16 else "fp16" if cfg.common.fp16 else "float32"
