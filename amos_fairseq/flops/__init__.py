"""Floating point operations of training, counted on meta tensors: the matrix products of forward and backward pass.

The backward pass has twice the products of the forward pass, fewer where a gradient is stopped (sampling, AMOS, a frozen
generator), and more where it computes something again: the logits of the output layer, unless the reference implementation is
counted (a CPU keeps up to 64 MiB of them, which is not considered here), and checkpointed layers. Unless the reference is
counted, positions whose output is not needed are left out after the attention of the last layer. The optimizer's step is not
counted.

Departures: Clark (2021, section 5.2.2; ELECTRA's tables) counts the backward pass as once the forward pass, embedding look-ups
as products with one-hot vectors, and element-wise operations. For BERT-Small, 1.45 million updates, the thesis prints 1.4e18;
the products of the same training are 1.55e18 here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import models, utils
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq.checkpoint_files import checkpoint_file
from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import Table
from amos_fairseq.recipes import DEFAULT_VOCABULARY, VOCABULARY_OF_WIDTH, Costs, find_recipe
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.setting_checks import check_ranges, describe, model_settings
from amos_fairseq.tasks.text_pretraining import TextPretrainingConfig, TextPretrainingTask
from amos_fairseq.text import MASK_SYMBOL

aten = torch.ops.aten
DEVICE = torch.device("meta")
# Products that are missing in PyTorch's counter, by the shapes of their arguments.
MATMULS = {
    aten.mv: lambda matrix, vector, **keywords: 2 * math.prod(matrix),
    aten.addmm_: lambda total, left, right, **keywords: 2 * math.prod(left) * right[-1],
}


class TrainingFlops(NamedTuple):
    """Operations of one update, over all micro-batches and ranks, and its tokens, ``<s>`` included."""

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        return self.per_update * self.max_update


@dataclass(frozen=True)
class CountedUpdate:
    """One update of a configuration: its parts on the meta device, and one micro-batch of full blocks."""

    cfg: DictConfig
    task: FairseqTask
    model: BaseFairseqModel
    criterion: torch.nn.Module
    batch: dict[str, Any]

    @property
    def batches(self) -> int:
        """Micro-batches of all ranks."""
        return self.cfg.optimization.update_freq[0] * self.cfg.distributed_training.distributed_world_size

    def training(self) -> TrainingFlops:
        def train_step() -> None:
            loss, _, _ = self.criterion(self.model, self.batch)
            loss.backward()

        tokens = self.batch["nsentences"] * self.batches * self.task.cfg.tokens_per_sample
        return TrainingFlops(
            count_matmuls(train_step)["Global"] * self.batches, tokens, self.cfg.optimization.max_update
        )


def build_update(cfg: DictConfig, vocabulary_size: int | None = None, reference: bool = False) -> CountedUpdate:
    """Build on the meta device what ``fairseq-hydra-train`` would train, where no kernel of a particular device runs.

    ``model.kernels=triton`` is counted as ``fast``, whose products it repeats or skips in the same places.

    Args:
        cfg: composed and resolved, as fairseq's trainer gets it.
        vocabulary_size: entries of the dictionary, all symbols included; None reads the dictionary of ``task.data``.
        reference: build the reference implementation instead, without recomputed layers.
    """
    if reason := why_not_counted(cfg):
        raise UserError(reason)
    task = build_task(cfg.task, vocabulary_size)
    with DEVICE:
        settings = {"kernels": "reference" if cfg.model.kernels == "reference" else "fast", "compile": False}
        if reference:
            settings |= {"kernels": "reference", "activation_checkpointing": False}
        model = models.build_model(OmegaConf.merge(cfg.model, settings), task).train()
        criterion = task.build_criterion(cfg.criterion).train()
    batch = task.full_batch(cfg.dataset.max_tokens, cfg.dataset.batch_size, model.max_positions())
    return CountedUpdate(cfg, task, model, criterion, utils.apply_to_sample(lambda tensor: tensor.to(DEVICE), batch))


def why_not_counted(cfg: DictConfig) -> str | None:
    """Return why a run has no end in updates, or a cost per update that varies; None if it can be counted."""
    updates, update_freq = cfg.optimization.max_update, list(cfg.optimization.update_freq)
    if minutes := OmegaConf.select(cfg, "lr_scheduler.minutes"):
        # A checkpoint of such a run has no number of updates.
        counted = (
            "counts its optimization.max_update" if updates > 0 else "and optimization.max_update=N count N updates"
        )
        return f"trains for {minutes / 60:.2g} hours; lr_scheduler.minutes=0 {counted}"
    if cfg.task._name != "text_pretraining":
        return f"the task is {cfg.task._name}: FLOPs are counted for pretraining (text_pretraining)"
    if updates < 1:
        return f"optimization.max_update={updates} sets no end: give the number of planned updates"
    if OmegaConf.select(cfg, "task.phases"):
        advice = "give task.phases=null and the length of one as task.tokens_per_sample"
        return f"task.phases change the cost of an update: {advice}"
    if len(set(update_freq)) != 1:
        return f"optimization.update_freq={update_freq} changes with the epoch, and with it the cost: give one number"
    return None


def count_matmuls(call: Callable[[], Any]) -> dict[str, int]:
    """Count the operations in products of matrices and vectors, including those of a backward pass in ``call``; a
    multiplication and an addition are two.

    Return those of every module that ran, including those inside it, under the name that PyTorch's counter uses
    (``AmosModel.discriminator``), and all operations as ``Global``.
    """
    with FlopCounterMode(display=False, custom_mapping=MATMULS) as counter:
        call()
    return {"Global": 0} | {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}


# A checkpoint that lacks one of these, such as an imported one, was not written by a run of pretraining.
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

    ``source``: a recipe's name, the path of a YAML, a checkpoint, or the SAVE_DIR of a run.
    """
    path = Path(source)
    if path.suffix == ".pt" or path.is_dir():
        file = checkpoint_file(path)
        return checkpoint_configuration(file, read_state(file), overrides)
    config_dir, name = find_recipe(source)
    cfg = compose_recipe(name, overrides, config_dir)
    return cfg, DEFAULT_VOCABULARY if OmegaConf.is_missing(cfg.task, "data") else None


def checkpoint_configuration(
    file: Path, state: dict[str, Any], overrides: Sequence[str] = ()
) -> tuple[DictConfig, int]:
    """Return the settings of a run, with defaults for newer settings, and the vocabulary size of its token embeddings."""
    settings = dict(state["cfg"])
    settings["model"] = model_settings(file, settings["model"])
    try:
        cfg = OmegaConf.create(settings)
        add_defaults(cfg)  # and types, but not for fairseq's own groups
        for field in dataclasses.fields(FairseqConfig):
            if dataclasses.is_dataclass(field.type) and field.name in cfg:
                schema = OmegaConf.structured(field.type)
                OmegaConf.set_struct(schema, False)  # keep settings that another version of fairseq has saved
                cfg[field.name] = OmegaConf.merge(schema, cfg[field.name])
        OmegaConf.set_struct(cfg, True)
        cfg.merge_with_dotlist(list(overrides))
        missing = [key for key in OF_A_RUN if OmegaConf.select(cfg, key) is None]
        missing += ["embed_tokens.weight"] * ("embed_tokens.weight" not in state["model"])
    except OmegaConfBaseException as error:
        missing = [describe(error)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # another type of section, an unknown criterion
        missing = [f"{type(error).__name__} {error}"]
    if missing:
        raise UserError(
            f"{file} cannot be counted ({missing[0]:.200}): give a checkpoint of pretraining, --set changes its settings"
        )
    return cfg, state["model"]["embed_tokens.weight"].size(0)


def training_flops(cfg: DictConfig, vocabulary_size: int | None = None, reference: bool = False) -> TrainingFlops:
    """Count one update of the model and criterion of ``cfg``, assuming full blocks: see ``build_update``."""
    return build_update(cfg, vocabulary_size, reference).training()


def count_costs(name: str, config_dir: Path) -> Costs:
    """Count a recipe on one rank with a vocabulary that suits its width, as in ``amos_fairseq.recipes.packaged_costs``;
    the arguments are those that ``amos_fairseq.recipes.find_recipe`` returns."""
    try:
        cfg = compose_recipe(name, ["distributed_training.distributed_world_size=1"], config_dir)
        suited = (size for width, size in VOCABULARY_OF_WIDTH.items() if cfg.model.encoder_embed_dim <= width)
        vocabulary_size = next(suited, DEFAULT_VOCABULARY)
        cost = training_flops(cfg, vocabulary_size, reference=True)
    except UserError as error:  # such as a variant with a setting that no paper prints
        return {"not_counted": str(error)}
    return {
        "layers": cfg.model.encoder_layers,
        "width": cfg.model.encoder_embed_dim,
        "length": cfg.task.tokens_per_sample,
        "vocabulary_size": vocabulary_size,
        "max_update": cost.max_update,
        "tokens": cost.tokens_per_update * cost.max_update,
        "flops": cost.total,
    }


def build_task(cfg: DictConfig, vocabulary_size: int | None) -> TextPretrainingTask:
    """Build the task with the corpus ``task.data``, or with a synthetic vocabulary."""
    if vocabulary_size is None:
        return TextPretrainingTask.setup_task(cfg)
    check_ranges(cfg, TextPretrainingConfig)
    # There is no corpus; these files are never opened.
    vocabulary = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)
    return TextPretrainingTask(cfg, vocabulary, synthetic_dictionary(vocabulary_size))


def synthetic_dictionary(size: int) -> Dictionary:
    """Build a dictionary of ``size`` entries, special symbols and ``<mask>`` included; pieces have counts as in a corpus."""
    dictionary = Dictionary()
    num_pieces = size - len(dictionary) - 1
    for number in range(num_pieces):
        dictionary.add_symbol(f"piece{number}", n=num_pieces - number)
    dictionary.add_symbol(MASK_SYMBOL)
    return dictionary


class FlopsReport(NamedTuple):
    """Floating point operations of training and inference.

    ``modules``: forward pass per token, by part of the model. ``inference_length``: tokens that the encoder processes, 128 as
    in thesis Table 5.3, or the model's maximum. ``inference``: forward pass of the final encoder alone; None if none remains
    after training (TwoTower).
    """

    update: CountedUpdate
    modules: dict[str, float]
    training: TrainingFlops
    inference_length: int
    inference: int | None


def report_flops(cfg: DictConfig, vocabulary_size: int | None, reference: bool = False) -> FlopsReport:
    """Count training and inference; the arguments of ``build_update``."""
    update = build_update(cfg, vocabulary_size, reference)
    length = min(128, update.model.max_positions())
    modules, inference = modules_per_token(update), inference_flops(update.model, length)
    return FlopsReport(update, modules, update.training(), length, inference)


def modules_per_token(update: CountedUpdate) -> dict[str, float]:
    """Return the products of the parts of the model in its own order, then of its work outside of them, then of the loss."""
    forward = count_matmuls(lambda: update.criterion(update.model, update.batch))  # loss included
    root = type(update.model).__name__
    modules = {}
    for name, child in update.model.named_children():
        path = f"{root}.{name}"
        # A list of modules has no forward pass of its own.
        names = [f"{path}.{each}" for each, _ in child.named_children()] if isinstance(child, nn.ModuleList) else [path]
        modules[name] = sum(forward.get(each, 0) for each in names)
    if update.cfg.model.get("generator_checkpoint"):  # a frozen generator is no submodule
        known = {"Global", root, type(update.criterion).__name__}
        modules["frozen_generator"] = sum(of for name, of in forward.items() if "." not in name and name not in known)
    # Products with the tied token embeddings, sampling.
    modules["output layer, sampling"] = forward[root] - sum(modules.values())
    modules["loss, statistics"] = forward["Global"] - forward[root]
    num_tokens = update.batch["net_input"]["tokens"].numel()
    return {name: flops / num_tokens for name, flops in modules.items() if flops}


def inference_flops(model: nn.Module, length: int) -> int | None:
    """Count the forward pass of the final encoder over one sequence of ``length`` tokens; None if there is no encoder."""
    try:
        model.encoder  # noqa: B018  (a property that may raise)
    except UserError:
        return None
    tokens = torch.full((1, length), model.vocabulary.end, device=DEVICE)
    model.eval()
    flops = count_matmuls(lambda: model.extract_features(tokens))["Global"]
    model.train()
    return flops


def print_report(name: str, report: FlopsReport) -> None:
    """Print the training setup, the forward pass by module, training and inference."""
    console, update, cost = Console(highlight=False), report.update, report.training
    sequences = f"{update.batch['nsentences']} sequences x {update.batches} batches"
    console.print(
        f"{name} ({update.cfg.criterion._name}): {cost.max_update:,} updates of {sequences} of "
        f"{update.cfg.task.tokens_per_sample} tokens; {update.model.embed_tokens.num_embeddings:,} rows of token embeddings",
        soft_wrap=True,
    )
    forward = sum(report.modules.values())
    rows = [[module, f"{flops:.3g}", f"{flops / forward:.1%}"] for module, flops in report.modules.items()]
    rows.append(["together", f"{forward:.3g}", ""])
    Table("Forward pass per token of the training text", ["module", "FLOPs", "share"], rows).print(console)
    numbers = [f"{number:.3g}" for number in (cost.per_token, cost.per_update, cost.total)]
    Table("Training", ["per token", "per update", "all updates"], [numbers]).print(console)
    inference = "No encoder remains after training: the towers score text (amos score)."
    if report.inference is not None:
        inference = f"Inference on one text of {report.inference_length} tokens: {report.inference:.3g}"
    console.print(inference, soft_wrap=True)
