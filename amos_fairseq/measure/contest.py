"""One run of ``amos bench``: steps of our model and its peers in turns, then the limits of the machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from omegaconf import DictConfig

from amos_fairseq.errors import UserError
from amos_fairseq.measure.bench_report import BenchReport, ContestRow
from amos_fairseq.measure.configuration import BenchSettings, BenchSetup, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, SyntheticText, make_synthetic_text
from amos_fairseq.measure.flops import training_flops
from amos_fairseq.measure.measurement import (
    Progress,
    TrainingStep,
    alternate,
    describe_machine,
    held_bytes,
    matmul_peak,
    memory_bandwidth,
    step_peak,
    versions,
)
from amos_fairseq.measure.micro_benchmarks import all_micro_benchmarks, time_micro_benchmark
from amos_fairseq.measure.step_profile import shares_of_parts
from amos_fairseq.models.configuration import (
    MODERN,
    MODERN_ARCH,
    MODERN_SIZES,
    SIZE_SETTINGS,
    SIZES,
    PaddedVocabulary,
)
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

PROFILED_STEPS = 2
HUGGING_FACE = {
    "hf": "transformers: head at masked positions, sdpa attention",
    "hf_naive": "transformers: head at all positions, eager attention",
}
PEERS = (*HUGGING_FACE, "reference")

# Settings of an ELECTRA recipe that Hugging Face's two networks support.
PLAIN_ELECTRA = {
    "model.relative_position_scheme": "none",
    "model.generator": "masked_lm",
    "model.generator_temperature": 1.0,
    "model.share_weights": "embeddings",
    "model.disallow_true_token": False,
    "model.adversarial": False,
    "model.frozen_generator": False,
    "model.main_objective": "detection",
    "model.disentangled_embeddings": False,
    "criterion.detection_positions": "all",
}
PLAIN_MLM = {"model.relative_position_scheme": "none"}
# Hugging Face's ModernBERT drops nothing where the layers add to their sum.
PLAIN_MODERN = {"model.dropout": 0.0}
PLAIN = {"model.activation_dropout": 0.0, "optimizer._name": "grouped_adam"}
# Settings that an ELECTRA recipe copies from the recipe of another objective when it becomes its peer.
COPIED = (
    "common.bf16",
    "common.fp16",
    "common.amp",
    "common.cpu",
    "common.seed",
    "task.precision",
    "task.tokens_per_sample",
    "task.mask_prob",
    "model.max_positions",
    "model.embedding_dim",
    "model.dropout",
    "model.attention_dropout",
    "model.layer_norm_eps",
    "dataset.batch_size",
    "dataset.max_tokens",
    "optimization.clip_norm",
    "optimization.update_freq",
    "distributed_training.distributed_world_size",
)


@dataclass(frozen=True)
class Contestant:
    """A training step and what its row needs besides the seconds.

    Attributes:
        name: label of its row.
        description: one sentence about it.
        setup: configuration whose model FLOPs are counted for its steps.
        unequal_work: how its work differs from ours; empty if it does not.
        is_ours: whether peers are compared with it.
        compiled: by ``torch.compile``; ours as in training (``model.compile``), a peer as a whole.
    """

    name: str
    description: str
    step: TrainingStep
    setup: BenchSetup
    unequal_work: str = ""
    is_ours: bool = False
    compiled: bool = False


def run_bench(settings: BenchSettings, progress: Progress = lambda text: None) -> BenchReport:
    """Measure what ``settings`` describe.

    Raises:
        UserError: the settings describe nothing that can be measured here, or it does not fit into memory.
    """
    setup = set_up(settings)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    text = make_synthetic_text(task, setup.batch_size, reads_corpus=setup.vocabulary_size is None)
    try:
        return measure(settings, setup, task, text, progress)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{setup.batch_size} sequences of {setup.cfg.task.tokens_per_sample} tokens for all contestants do not fit into "
            "the memory of the GPU: lower dataset.batch_size with --set, or give fewer peers"
        ) from error


def measure(
    settings: BenchSettings, setup: BenchSetup, task: TextPretrainingTask, text: SyntheticText, progress: Progress
) -> BenchReport:
    progress("building the contestants")
    contestants, not_built = build_contestants(setup, task, settings.peers, settings.compile)
    contestants, not_run = warm_up(contestants, text, settings.warmup, setup.device, progress)
    seconds = alternate([each.step for each in contestants], text.batches, settings.steps, setup.device, progress)
    progress("memory of a step")
    rows = [contest_row(each, own, setup, text) for each, own in zip(contestants, seconds, strict=True)]
    progress("profile of a step")
    parts = shares_of_parts(contestants[0].step, text.batches[0], setup.device, PROFILED_STEPS)
    del contestants  # free their memory
    progress("limits of the machine")
    peak, bandwidth = matmul_peak(setup.device, setup.dtype), memory_bandwidth(setup.device)
    benchmarks = all_micro_benchmarks(setup, task, text.batches[0]) if settings.pieces else ()
    return BenchReport(
        settings=settings,
        setup=setup,
        rows=rows,
        not_compiled=not_built | not_run,
        text=text,
        vocabulary_rows=PaddedVocabulary.of(task.source_dictionary).padded_size,
        parts=parts,
        micro_benchmarks=[time_micro_benchmark(each, setup.device, peak, bandwidth, progress) for each in benchmarks],
        matmul_peak=peak,
        bandwidth=bandwidth,
        machine=describe_machine(setup.device),
        versions=versions(),
    )


def warm_up(
    contestants: Sequence[Contestant], text: SyntheticText, steps: int, device: torch.device, progress: Progress
) -> tuple[list[Contestant], dict[str, str]]:
    """Run unmeasured steps, at least one each: the first one compiles, and creates the optimizer's moments.

    Returns:
        The remaining contestants, and the reason for each contestant that torch.compile cannot compile here.
    """
    remaining, not_compiled = [], {}
    for contestant in contestants:
        progress(f"warming up: {contestant.name}")
        try:
            alternate([contestant.step], text.batches, max(steps, 1), device, lambda text: None)
        except Exception as error:
            # Anything the compiler, C++ or Triton raises; without compilation it is a bug or a mistake of the user.
            if not contestant.compiled or isinstance(error, torch.OutOfMemoryError):
                raise
            not_compiled[contestant.name] = (str(error).strip().splitlines() or [repr(error)])[0]
            continue
        remaining.append(contestant)
    return remaining, not_compiled


def contest_row(contestant: Contestant, seconds: list[float], setup: BenchSetup, text: SyntheticText) -> ContestRow:
    """Return the row of a contestant: seconds, memory, and model FLOPs per token."""
    step, counted = contestant.step, contestant.setup
    held, peak = held_bytes(*step.state()), None
    if not contestant.compiled or setup.device.type == "cuda":  # compiled code on a CPU hides its tensors
        peak = held + step_peak(lambda: step.step(text.batches[0]), setup.device)
    return ContestRow(
        name=contestant.name,
        description=contestant.description,
        is_ours=contestant.is_ours,
        unequal_work=contestant.unequal_work,
        parameters=sum(parameter.numel() for parameter in step.module.parameters()),
        seconds=seconds,
        tokens_per_step=text.tokens_per_batch,
        flops_per_token=training_flops(counted.cfg, counted.vocabulary_size, reference=True).per_token,
        held_bytes=held,
        peak_bytes=peak,
    )


def build_contestants(
    setup: BenchSetup, task: TextPretrainingTask, peers: Sequence[str], compile: bool
) -> tuple[list[Contestant], dict[str, str]]:
    """Build our contestant, then the peers in their order, compiled if the recipe is; with ``compile`` each without and with.

    Returns:
        The contestants, and the reason for each that cannot be compiled here if ``compile`` asked for it.

    Raises:
        UserError: a peer is unknown, or cannot follow the recipe.
    """
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peer {peer} is unknown: choose among {', '.join(PEERS)}")
    contestants, not_compiled = [], {}
    for compiled in (False, True) if compile else (bool(setup.cfg.model.compile),):
        for name in ("ours", *dict.fromkeys(peers)):
            label = f"{name}, compiled" if compiled else name
            try:
                contestants.append(build_contestant(setup, task, name, label, compiled))
            except UserError as error:
                if not (compile and compiled):  # with --compile, the same was built without compilation before
                    raise
                not_compiled[label] = str(error)
    return contestants, not_compiled


def build_contestant(setup: BenchSetup, task: TextPretrainingTask, name: str, label: str, compiled: bool) -> Contestant:
    if name not in HUGGING_FACE:
        setup = setup.with_model(compile=compiled)
        if name == "reference":
            setup = setup.with_model(kernels="reference")
        description = f"amos_fairseq, fairseq's trainer, model.kernels={setup.cfg.model.kernels}"
        step = FairseqStep(setup, task)
        return Contestant(label, description, step, setup, is_ours=name == "ours", compiled=compiled)
    # Imported here: transformers takes seconds to import, and not every run needs it.
    from amos_fairseq.measure.hugging_face import HuggingFaceStep, build_objective

    peer_setup, difference = comparable_setup(setup)
    vocabulary = PaddedVocabulary.of(task.source_dictionary)
    torch.manual_seed(setup.cfg.common.seed)
    module = build_objective(peer_setup.cfg, vocabulary.padded_size, vocabulary.pad, naive=name == "hf_naive")
    step = HuggingFaceStep(peer_setup, module)
    if compiled:
        module.compile(dynamic=False)
    return Contestant(label, HUGGING_FACE[name], step, peer_setup, difference, compiled=compiled)


def comparable_setup(setup: BenchSetup) -> tuple[BenchSetup, str]:
    """Return the ``electra`` or ``mlm`` configuration for Hugging Face's networks, and how it differs from ours.

    Raises:
        UserError: our configuration has settings that they do not support, or sizes of no ELECTRA recipe.
    """
    objective = setup.cfg.criterion._name
    if objective in ("electra", "mlm"):
        plain = PLAIN_ELECTRA if objective == "electra" else PLAIN_MLM
        check_supported(setup.cfg, plain | (PLAIN_MODERN if setup.cfg.model.encoder == MODERN else {}))
        return setup, ""
    cfg = electra_of_equal_size(setup.cfg)
    check_supported(cfg, PLAIN_ELECTRA)
    return (
        BenchSetup(cfg, setup.vocabulary_size, setup.device, setup.precision),
        f"ELECTRA instead of {objective}: the main encoder, batch, length and vocabulary are equal, generator and "
        "objective are not",
    )


def check_supported(cfg: DictConfig, plain: dict[str, object]) -> None:
    for key, expected in (plain | PLAIN).items():
        group, name = key.split(".")
        if cfg[group][name] != expected:
            raise UserError(
                f"{key}={cfg[group][name]} is not supported by Hugging Face's networks: remove the peers "
                f"{' and '.join(HUGGING_FACE)}, or set {key}={expected}"
            )


def electra_of_equal_size(cfg: DictConfig) -> DictConfig:
    """Return the ELECTRA recipe with the same encoder, and the batch, length, embedding width and dropout of ``cfg``."""
    modern = {f"{MODERN_ARCH}_{size}": values for size, values in MODERN_SIZES.items()}
    sizes = modern if cfg.model.encoder == MODERN else SIZES
    for size, values in sizes.items():
        if all(cfg.model[name] == values[name] for name in SIZE_SETTINGS):
            electra = compose_recipe(f"electra_{size}")
            break
    else:
        raise UserError(
            "no ELECTRA recipe has an encoder of these sizes to compare with: remove the peers "
            f"{' and '.join(HUGGING_FACE)}, or use the sizes of a recipe ({', '.join(sizes)})"
        )
    for key in COPIED:
        group, name = key.split(".")
        electra[group][name] = cfg[group][name]
    return electra
