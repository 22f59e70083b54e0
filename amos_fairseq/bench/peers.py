"""Who takes part in the contest, and how equal the work of each is to ours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from amos_fairseq.bench.fairseq_step import FairseqStep
from amos_fairseq.bench.settings import Setup
from amos_fairseq.bench.timing import Contestant
from amos_fairseq.composition import compose_recipe
from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import SIZES, PaddedVocabulary
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

HUGGING_FACE = {
    "hf": "transformers: head at masked positions, sdpa attention",
    "hf_naive": "transformers: head at all positions, eager attention",
}
PEERS = (*HUGGING_FACE, "reference")

# Settings of an electra recipe that Hugging Face's two networks have no part for.
PLAIN_ELECTRA = {
    "model.relative_position_scheme": "none",
    "model.generator": "masked_lm",
    "model.generator_temperature": 1.0,
    "model.share_weights": "embeddings",
    "model.disallow_true_token": False,
    "model.adversarial": False,
    "model.frozen_generator": False,
    "model.main_objective": "detection",
    "criterion.detection_positions": "all",
}
PLAIN_MLM = {"model.relative_position_scheme": "none"}
PLAIN = {"model.activation_dropout": 0.0, "optimizer._name": "grouped_adam"}
# What an ELECTRA recipe takes over from a recipe of another objective, to be its peer.
TAKEN_OVER = (
    "common.bf16", "common.fp16", "common.amp", "common.cpu", "common.seed",
    "task.tokens_per_sample", "task.mask_prob",
    "model.max_positions", "model.embedding_dim", "model.dropout", "model.attention_dropout", "model.layer_norm_eps",
    "dataset.batch_size", "dataset.max_tokens", "optimization.clip_norm", "optimization.update_freq",
    "distributed_training.distributed_world_size",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A contestant and what its row needs beside the seconds.

    Attributes:
        setup: the configuration whose model FLOPs its steps are worth.
        unequal_work: empty, or how its work differs from ours.
        is_ours: what peers are compared with.
        compiled: by ``torch.compile``; ours as training does it (``model.compile``), a peer as a whole.
    """

    contestant: Contestant
    setup: Setup
    unequal_work: str = ""
    is_ours: bool = False
    compiled: bool = False


def build_entries(
    setup: Setup, task: TextPretrainingTask, peers: Sequence[str], compile: bool
) -> tuple[list[Entry], dict[str, str]]:
    """Ours first, then the peers in their order, compiled where the recipe is; with ``compile`` each without and with.

    Returns:
        The entries, and why others are none of them: nothing can be compiled here, which only what was asked for beside
        the recipe survives.

    Raises:
        UserError: an unknown peer, or a recipe that a peer cannot follow.
    """
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peer {peer} is unknown: choose among {', '.join(PEERS)}")
    entries, refusals = [], {}
    for compiled in (False, True) if compile else (bool(setup.cfg.model.compile),):
        for name in ("ours", *dict.fromkeys(peers)):
            label = f"{name}, compiled" if compiled else name
            try:
                entries.append(build_entry(setup, task, name, label, compiled))
            except UserError as error:
                if not (compile and compiled):  # without compilation the same was built before
                    raise
                refusals[label] = str(error)
    return entries, refusals


def build_entry(setup: Setup, task: TextPretrainingTask, name: str, label: str, compiled: bool) -> Entry:
    if name in HUGGING_FACE:
        entry = hugging_face_entry(setup, task, name, label, compiled)
        if compiled:
            entry.contestant.module.compile(dynamic=False)
        return entry
    setup = setup.with_model(compile=compiled)
    if name == "reference":
        setup = setup.with_model(kernels="reference")
    description = f"amos_fairseq, fairseq's trainer, model.kernels={setup.cfg.model.kernels}"
    return Entry(FairseqStep(setup, task, label, description), setup, is_ours=name == "ours", compiled=compiled)


def hugging_face_entry(setup: Setup, task: TextPretrainingTask, name: str, label: str, compiled: bool) -> Entry:
    # Imported here: transformers takes seconds, and not every contest has it.
    from amos_fairseq.bench.hugging_face import build_objective
    from amos_fairseq.bench.hugging_face_step import HuggingFaceStep

    peer_setup, difference = comparable(setup)
    rows = PaddedVocabulary.of(task.source_dictionary)
    torch.manual_seed(setup.cfg.common.seed)
    module = build_objective(peer_setup.cfg, rows.padded_size, rows.pad, naive=name == "hf_naive")
    step = HuggingFaceStep(peer_setup, module, label, HUGGING_FACE[name])
    return Entry(step, peer_setup, difference, compiled=compiled)


def comparable(setup: Setup) -> tuple[Setup, str]:
    """The ``electra`` or ``mlm`` configuration that Hugging Face's networks can follow, and how it differs from ours.

    Raises:
        UserError: ours has settings that they have no part for, or no size of an ELECTRA recipe.
    """
    objective = setup.cfg.criterion._name
    if objective in ("electra", "mlm"):
        refuse_variants(setup.cfg, PLAIN_ELECTRA if objective == "electra" else PLAIN_MLM)
        return setup, ""
    cfg = electra_of_equal_size(setup.cfg)
    refuse_variants(cfg, PLAIN_ELECTRA)
    return (
        Setup(cfg, setup.vocabulary_size, setup.device, setup.precision),
        f"ELECTRA instead of {objective}: the main encoder, batch, length and vocabulary are equal, generator and "
        "objective are not",
    )


def refuse_variants(cfg: DictConfig, plain: dict[str, object]) -> None:
    for key, expected in (plain | PLAIN).items():
        group, name = key.split(".")
        if cfg[group][name] != expected:
            raise UserError(
                f"{key}={cfg[group][name]} is nothing that Hugging Face's networks can do: leave the peers "
                f"{' and '.join(HUGGING_FACE)} out, or set {key}={expected}"
            )


def electra_of_equal_size(cfg: DictConfig) -> DictConfig:
    """The ELECTRA recipe with the same encoder, and batch, length, vocabulary width and dropout of ``cfg``."""
    for size, numbers in SIZES.items():
        if all(cfg.model[name] == number for name, number in numbers.items()):
            electra = compose_recipe(f"electra_{size}")
            break
    else:
        raise UserError(
            "no ELECTRA recipe has an encoder of these sizes to compare with: leave the peers "
            f"{' and '.join(HUGGING_FACE)} out, or take the sizes of a recipe ({', '.join(SIZES)})"
        )
    for key in TAKEN_OVER:
        group, name = key.split(".")
        electra[group][name] = cfg[group][name]
    return electra
