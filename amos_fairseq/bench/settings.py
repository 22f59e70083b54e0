"""What ``amos bench`` is asked for, and the configuration that it measures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf

from amos_fairseq.compat.precision import choose_precision
from amos_fairseq.errors import UserError
from amos_fairseq.flops.source import read_configuration

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A step is one micro-batch on one device, so these are no setting of the measurement.
NOT_MEASURED = ("optimization.update_freq", "distributed_training.distributed_world_size")


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``amos bench``.

    Attributes:
        config: as :func:`read_configuration` takes it.
        overrides: ``KEY=VALUE``.
        peers: names of :data:`amos_fairseq.bench.peers.PEERS`, in the order of the table.
        precision: a key of :data:`DTYPES`; None is the recipe's own.
        steps, warmup: measured and unmeasured steps of each contestant.
        threads: of a CPU; None leaves PyTorch's choice.
        device: ``cpu`` or ``cuda``; None is a GPU where there is one.
        vocabulary_size: entries of the dictionary; None reads ``task.data``, or the checkpoint.
        compile: measure every contestant once more under ``torch.compile``.
        pieces: measure attention, output layer, sampling and optimizer each by itself as well.
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


@dataclass(frozen=True)
class Setup:
    """A configuration ready to be measured.

    Attributes:
        cfg: with one micro-batch an update, one rank, the chosen precision and device.
        vocabulary_size: None reads ``task.data``.
        precision: a key of :data:`DTYPES`.
    """

    cfg: DictConfig
    vocabulary_size: int | None
    device: torch.device
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def with_model(self, **settings: str | bool) -> "Setup":
        """The same with other settings of the model."""
        cfg = self.cfg.copy()
        cfg.model.update(settings)
        return Setup(cfg, self.vocabulary_size, self.device, self.precision)


def prepare(settings: BenchSettings, default_vocabulary: int) -> Setup:
    """Read the configuration and fit it to the machine; ``default_vocabulary`` serves a recipe without data.

    Raises:
        UserError: a number that measures nothing, a device or number format that is not there, no pretraining recipe.
    """
    check_numbers(settings)
    device = choose_device(settings.device)
    cfg, saved_size = read_configuration(settings.config, settings.overrides)
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task {cfg.task._name} is no pretraining: amos bench measures steps of text_pretraining")
    cfg.optimization.update_freq = [1]
    cfg.distributed_training.distributed_world_size = 1
    cfg.common.cpu = device.type == "cpu"
    precision = settings.precision or own_precision(cfg)
    cfg.common.bf16, cfg.common.fp16, cfg.common.amp = precision == "bf16", precision == "fp16", False
    choose_precision(cfg, has_gpu=device.type == "cuda")
    size = settings.vocabulary_size if settings.vocabulary_size is not None else saved_size
    if size is None and OmegaConf.is_missing(cfg.task, "data"):
        size = default_vocabulary
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return Setup(cfg, size, device, precision)


def check_numbers(settings: BenchSettings) -> None:
    """Raise :class:`UserError` for what cannot be measured."""
    for name, least in (("steps", 1), ("warmup", 0), ("threads", 1)):
        number = getattr(settings, name)
        if number is not None and number < least:
            raise UserError(f"--{name} {number} must be at least {least}")
    for name in NOT_MEASURED:
        if any(override.lstrip("+").startswith(f"{name}=") for override in settings.overrides):
            raise UserError(
                f"--set {name}=... has no meaning here: a step is one micro-batch on one device; leave it out"
            )


def choose_device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("--device cuda: PyTorch finds no GPU here; leave the flag out or give --device cpu")
    return torch.device(name or ("cuda" if has_gpu else "cpu"))


def own_precision(cfg: DictConfig) -> str:
    """What the recipe trains in; :class:`UserError` for ``common.amp``, which is measured as fp16 or not at all."""
    if cfg.common.amp:
        raise UserError("common.amp=true has no bench: give --precision float32, bf16 or fp16")
    return "bf16" if cfg.common.bf16 else "fp16" if cfg.common.fp16 else "float32"
