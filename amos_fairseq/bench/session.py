"""One run of ``amos bench``: the contest, then what it is measured against."""

import sys
from collections.abc import Sequence

import torch

from amos_fairseq.bench.machine import describe_machine, matmul_peak, memory_bandwidth, versions
from amos_fairseq.bench.made_up_text import MadeUpText, make_up_text
from amos_fairseq.bench.memory import held_bytes, step_peak
from amos_fairseq.bench.peers import Entry, build_entries
from amos_fairseq.bench.pieces import all_pieces, time_piece
from amos_fairseq.bench.profile import shares_of_parts
from amos_fairseq.bench.report import PieceTime, Report, Row
from amos_fairseq.bench.settings import BenchSettings, Setup, prepare
from amos_fairseq.bench.timing import Progress, alternate
from amos_fairseq.data.block_iterator import blocks_per_batch
from amos_fairseq.errors import UserError
from amos_fairseq.flops.recipe import build_task
from amos_fairseq.flops.training import training_flops
from amos_fairseq.models.configuration import PaddedVocabulary
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

PROFILED_STEPS = 2


def run_bench(settings: BenchSettings, default_vocabulary: int, progress: Progress = lambda text: None) -> Report:
    """Measure what ``settings`` describe; ``default_vocabulary`` entries where nothing names others.

    Raises:
        UserError: they describe nothing that can be measured here, or it does not fit into the memory.
    """
    setup = prepare(settings, default_vocabulary)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    batch_size = micro_batch_size(setup)
    text = make_up_text(task, batch_size, reads_corpus=setup.vocabulary_size is None)
    try:
        return measure(settings, setup, task, text, batch_size, progress)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{batch_size} sequences of {setup.cfg.task.tokens_per_sample} tokens for all contestants do not fit into the "
            "memory of the GPU: lower dataset.batch_size with --set, or give fewer peers"
        ) from error


def micro_batch_size(setup: Setup) -> int:
    cfg = setup.cfg
    return blocks_per_batch(
        cfg.task.tokens_per_sample, cfg.dataset.max_tokens, cfg.dataset.batch_size, cfg.model.max_positions
    )


def measure(
    settings: BenchSettings,
    setup: Setup,
    task: TextPretrainingTask,
    text: MadeUpText,
    batch_size: int,
    progress: Progress,
) -> Report:
    progress("building the contestants")
    entries, not_built = build_entries(setup, task, settings.peers, settings.compile)
    entries, not_run = warm_up(entries, text, settings.warmup, setup.device, progress)
    contestants = [entry.contestant for entry in entries]
    seconds = alternate(contestants, text.batches, settings.steps, setup.device, progress)
    progress("memory of a step")
    rows = [row_of(entry, of_entry, setup, text) for entry, of_entry in zip(entries, seconds, strict=True)]
    progress("profile of a step")
    parts = shares_of_parts(contestants[0], text.batches[0], setup.device, PROFILED_STEPS)
    del entries, contestants  # their memory would be in the way
    progress("what the machine can do")
    peak, bandwidth = matmul_peak(setup.device, setup.dtype), memory_bandwidth(setup.device)
    return Report(
        settings=settings,
        setup=setup,
        rows=rows,
        refusals=not_built | not_run,
        text=text,
        batch_size=batch_size,
        num_rows=num_rows(task),
        parts=parts,
        pieces=measure_pieces(setup, task, text, peak, bandwidth, progress) if settings.pieces else [],
        matmul_peak=peak,
        bandwidth=bandwidth,
        machine=describe_machine(setup.device),
        versions=versions(),
    )


def measure_pieces(
    setup: Setup, task: TextPretrainingTask, text: MadeUpText, peak: float, bandwidth: float, progress: Progress
) -> list[PieceTime]:
    return [
        time_piece(piece, setup.device, peak, bandwidth, progress) for piece in all_pieces(setup, task, text.batches[0])
    ]


def warm_up(
    entries: Sequence[Entry], text: MadeUpText, steps: int, device: torch.device, progress: Progress
) -> tuple[list[Entry], dict[str, str]]:
    """Unmeasured steps; contestants that torch.compile cannot compile here leave the contest, with the reason.

    At least one step each: the first one compiles, and makes the optimizer's moments.
    """
    kept, refusals = [], {}
    for entry in entries:
        progress(f"warming up: {entry.contestant.name}")
        try:
            alternate([entry.contestant], text.batches, max(steps, 1), device, lambda text: None)
        except Exception as error:
            # Whatever the compiler, or the C++ or Triton behind it, raises; without it an error is ours or the user's.
            if not entry.compiled or isinstance(error, torch.OutOfMemoryError):
                raise
            refusals[entry.contestant.name] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            continue
        kept.append(entry)
    return kept, refusals


def row_of(entry: Entry, seconds: list[float], setup: Setup, text: MadeUpText) -> Row:
    """The seconds of a contestant, its memory, and the model FLOPs of a token."""
    held = held_bytes(*entry.contestant.state())
    is_seen = not entry.compiled or setup.device.type == "cuda"
    return Row(
        name=entry.contestant.name,
        description=entry.contestant.description,
        is_ours=entry.is_ours,
        unequal_work=entry.unequal_work,
        num_parameters=sum(parameter.numel() for parameter in entry.contestant.module.parameters()),
        seconds=seconds,
        tokens_per_step=text.tokens_per_batch,
        flops_per_token=training_flops(entry.setup.cfg, entry.setup.vocabulary_size).per_token,
        held_bytes=held,
        peak_bytes=held + step_peak(lambda: entry.contestant.step(text.batches[0]), setup.device) if is_seen else None,
    )


def num_rows(task: TextPretrainingTask) -> int:
    return PaddedVocabulary.of(task.source_dictionary).padded_size


def print_progress(text: str) -> None:
    """One line that is written over, where a person looks on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
