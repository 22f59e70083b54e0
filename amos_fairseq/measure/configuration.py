"""What is measured: a configuration, and its task, model, criterion and batch.

FLOPs are counted in real sizes on the meta device, without data; a measured step runs on a device of this machine.
"""

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.checkpoint_files import checkpoint_file
from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.data.block_iterator import blocks_per_batch
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.recipes import DEFAULT_VOCABULARY, find_recipe
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run.precision import FLAGS, requested_precision, set_precision
from amos_fairseq.setting_checks import check_ranges, config_class, model_settings
from amos_fairseq.tasks.text_pretraining import TextPretrainingConfig, TextPretrainingTask
from amos_fairseq.text.special_tokens import LARGEST_VOCABULARY, MASK_SYMBOL
from amos_fairseq.training_flops import CountedUpdate, build_update

# A checkpoint without one of these was not written by a run of pretraining, such as an imported one.
OF_A_RUN = (
    "task._name",
    "task.tokens_per_sample",
    "criterion._name",
    "model.encoder_embed_dim",
    "optimization.max_update",
    "optimization.update_freq",
    "distributed_training.distributed_world_size",
    "dataset",
)


def read_configuration(source: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, int | None]:
    """Read a configuration and the size of its vocabulary: a default for a recipe without ``task.data``, None with it.

    Args:
        source: a recipe's name, the path of a YAML, a checkpoint, or the SAVE_DIR of a run.
        overrides: ``KEY=VALUE`` settings, such as ``model.dropout=0.2``.

    Raises:
        UserError: the source does not exist or is damaged, is no run of pretraining, or an override names an unknown setting.
    """
    path = Path(source)
    if path.suffix == ".pt" or path.is_dir():
        file = checkpoint_file(path)
        cfg, vocabulary_size = checkpoint_configuration(file, read_state(file), overrides)
        if missing := missing_settings(cfg):
            raise UserError(
                f"{file} does not contain the settings of a run ({missing[0]} is missing): give a checkpoint of pretraining"
            )
        return cfg, vocabulary_size
    config_dir, name = find_recipe(source)
    cfg = compose_recipe(name, overrides, config_dir)
    return cfg, DEFAULT_VOCABULARY if OmegaConf.is_missing(cfg.task, "data") else None


def missing_settings(cfg: DictConfig) -> list[str]:
    """Return the settings of :data:`OF_A_RUN` that the settings in a checkpoint lack."""
    return [key for key in OF_A_RUN if OmegaConf.select(cfg, key) is None]


def checkpoint_configuration(
    file: Path, state: dict[str, Any], overrides: Sequence[str] = ()
) -> tuple[DictConfig, int]:
    """Return the settings of a run, with defaults for newer settings, and the vocabulary size of its token embeddings.

    Args:
        state: content of the checkpoint ``file``, as :func:`amos_fairseq.checkpoints.read.read_state` returns it.

    Raises:
        UserError: the checkpoint has no such settings or embeddings, or an override names an unknown setting.
    """
    settings = dict(state["cfg"])
    settings["model"] = model_settings(file, settings["model"])
    if "embed_tokens.weight" not in state["model"]:
        raise UserError(f"{file} has no token embeddings: give an unmodified pretraining checkpoint")
    groups = {field.name for field in dataclasses.fields(FairseqConfig) if dataclasses.is_dataclass(field.type)}
    if wrong := next((name for name in sorted(groups) if not isinstance(settings.get(name, {}), dict)), None):
        raise UserError(f"{file} has no settings in cfg.{wrong}: give a checkpoint as it was saved")
    section = settings.get("criterion")
    criterion = section.get("_name") if isinstance(section, dict) else section
    if criterion is not None and config_class("criterion", criterion) is None:
        raise UserError(
            f"{file}: the criterion {reprlib.repr(criterion)} is not known: give a checkpoint of fairseq-train"
        )
    try:
        cfg = OmegaConf.create(settings)
        add_defaults(cfg)
        add_types(cfg)
        OmegaConf.set_struct(cfg, True)
        cfg.merge_with_dotlist(list(overrides))
    except OmegaConfBaseException as error:
        reason = f"{error.full_key}: {str(error).splitlines()[0]}"
        raise UserError(f"{file}: {reason}; its settings can be changed with --set KEY=VALUE") from error
    return cfg, state["model"]["embed_tokens.weight"].size(0)


def add_types(cfg: DictConfig) -> None:
    """Type fairseq's own groups (optimization, dataset, ...), as :func:`add_defaults` does for the others."""
    for field in dataclasses.fields(FairseqConfig):
        if dataclasses.is_dataclass(field.type) and field.name in cfg:
            schema = OmegaConf.structured(field.type)
            OmegaConf.set_struct(schema, False)  # keep settings that another version of fairseq has saved
            cfg[field.name] = OmegaConf.merge(schema, cfg[field.name])


def build_counted_update(cfg: DictConfig, vocabulary_size: int | None = None, reference: bool = False) -> CountedUpdate:
    """Build what ``fairseq-hydra-train`` would train: :func:`~amos_fairseq.training_flops.build_update`.

    Args:
        cfg: composed and resolved, as fairseq's trainer gets it.
        vocabulary_size: number of dictionary entries, special symbols and ``<mask>`` included; None reads the dictionary of
            ``task.data``.

    Raises:
        UserError: the settings describe no pretraining run, or one without an end or with a varying cost per update.
    """
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task is {cfg.task._name}: FLOPs are counted for pretraining (text_pretraining)")
    return build_update(cfg, build_task(cfg.task, vocabulary_size), reference)


def build_task(cfg: DictConfig, vocabulary_size: int | None) -> TextPretrainingTask:
    """Build the task with the corpus ``task.data``, or with a synthetic vocabulary."""
    if vocabulary_size is None:
        return TextPretrainingTask.setup_task(cfg)
    check_ranges(cfg, TextPretrainingConfig)
    # There is no corpus; these files are never opened.
    vocabulary = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)
    return TextPretrainingTask(cfg, vocabulary, synthetic_dictionary(vocabulary_size))


def synthetic_dictionary(size: int) -> Dictionary:
    """Build a dictionary of ``size`` entries, special symbols and ``<mask>`` included; pieces have counts as in a corpus.

    Raises:
        UserError: ``size`` leaves no room for a piece, or is larger than any vocabulary.
    """
    if size > LARGEST_VOCABULARY:
        raise UserError(f"a vocabulary of {size} is more than the {LARGEST_VOCABULARY:,} that can be counted")
    dictionary = Dictionary()
    num_pieces = size - len(dictionary) - 1
    if num_pieces < 1:
        raise UserError(f"a vocabulary of {size} has no room for pieces beside {len(dictionary) + 1} special symbols")
    for number in range(num_pieces):
        dictionary.add_symbol(f"piece{number}", n=num_pieces - number)
    dictionary.add_symbol(MASK_SYMBOL)
    return dictionary


DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A measured step is one micro-batch on one device, so these settings cannot be chosen.
FIXED = ("optimization.update_freq", "distributed_training.distributed_world_size")


@dataclass(frozen=True)
class BenchSettings:
    """The flags of ``amos bench``.

    Attributes:
        config: source of the configuration, see :func:`read_configuration`.
        overrides: ``KEY=VALUE`` settings.
        peers: names from :data:`amos_fairseq.measure.contest.PEERS`, in the order of the table.
        precision: a key of :data:`DTYPES`; None takes the recipe's.
        steps, warmup: measured and unmeasured steps of each contestant.
        threads: number of CPU threads; None takes PyTorch's default.
        device: ``cpu`` or ``cuda``; None takes a GPU if there is one.
        vocabulary_size: number of dictionary entries; None takes that of :func:`read_configuration`.
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
class BenchSetup:
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

    def with_model(self, **settings: str | bool) -> "BenchSetup":
        """Return a copy with other model settings."""
        cfg = self.cfg.copy()
        cfg.model.update(settings)
        return BenchSetup(cfg, self.vocabulary_size, self.device, self.precision)


def set_up(settings: BenchSettings) -> BenchSetup:
    """Read the configuration and adapt it to this machine.

    Raises:
        UserError: a value is out of range, the device or precision is not available, or the task is not pretraining.
    """
    check_bench_values(settings)
    device = choose_device(settings.device)
    cfg, vocabulary_size = read_configuration(settings.config, settings.overrides)
    if cfg.task._name != "text_pretraining":
        raise UserError(f"the task is {cfg.task._name}: amos bench measures pretraining steps (text_pretraining)")
    cfg.optimization.update_freq = [1]
    cfg.distributed_training.distributed_world_size = 1
    cfg.common.cpu = device.type == "cpu"
    if settings.precision is not None:
        cfg.task.precision = settings.precision
        cfg.common.update(dict.fromkeys(FLAGS, False))
    elif requested_precision(cfg)[0] == "amp":
        raise UserError("common.amp=true cannot be measured: give --precision float32, bf16 or fp16")
    precision = set_precision(cfg, on_gpu=device.type == "cuda")
    if settings.vocabulary_size is not None:
        vocabulary_size = settings.vocabulary_size
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return BenchSetup(cfg, vocabulary_size, device, precision)


def check_bench_values(settings: BenchSettings) -> None:
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
