"""Traces of several ranks on one machine: every process is a rank of gloo on the CPU and runs updates of fairseq's own
trainer on made-up text under ``torch.profiler``.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.distributed import utils as distributed_utils
from torch.profiler import ProfilerActivity, profile, record_function

from amos_fairseq.bench.exchange_trace import UPDATE, read_updates
from amos_fairseq.bench.fairseq_step import FairseqStep
from amos_fairseq.bench.machine import describe_machine, versions
from amos_fairseq.bench.made_up_text import make_up_text
from amos_fairseq.bench.ranks_page import RanksReport
from amos_fairseq.bench.session import micro_batch_size
from amos_fairseq.bench.settings import BenchSettings, Setup, prepare
from amos_fairseq.bench.timing import Batch, Progress
from amos_fairseq.collectives import raise_on_every_rank
from amos_fairseq.compat.distribution import TORCHRUN_VARIABLES, arrange_ranks
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.flops.recipe import build_task

# DistributedDataParallel sorts its buckets by the first backward pass.
WARMUP_UPDATES = 2


@dataclass(frozen=True)
class RanksSettings:
    """What is traced.

    Attributes:
        bench: configuration, overrides, number format; on the CPU, one thread a rank.
        update_freqs: micro-batches of an update, each number traced by itself.
        updates: traced updates of each.
        directory: where the traces go: there, and the same for all ranks.
    """

    bench: BenchSettings
    update_freqs: Sequence[int]
    updates: int
    directory: Path


def check_launch() -> None:
    """Raise :class:`UserError` where this process is not one of several that torchrun has started."""
    if any(name not in os.environ for name in TORCHRUN_VARIABLES) or int(os.environ["WORLD_SIZE"]) < 2:
        raise UserError("ranks exchange nothing here: start it with 'torchrun --standalone --nproc-per-node 2 -m ...'")


def trace_ranks(settings: RanksSettings, default_vocabulary: int, progress: Progress) -> RanksReport | None:
    """Connect, trace, and read all traces on the first rank; None on the others. Every rank has to call this.

    Raises:
        UserError: what :func:`prepare` and :func:`check_launch` refuse.
    """
    check_launch()
    setup = prepare(settings.bench, default_vocabulary)
    arrange_ranks(setup.cfg, os.environ, num_gpus=0)
    distributed_utils.distributed_init(setup.cfg)
    logging.getLogger().setLevel(logging.WARNING)  # fairseq has just told the first rank to speak
    try:
        return trace_connected(settings, setup, progress)
    finally:
        torch.distributed.destroy_process_group()


def trace_connected(settings: RanksSettings, setup: Setup, progress: Progress) -> RanksReport | None:
    training = setup.cfg.distributed_training
    rank, num_ranks = training.distributed_rank, training.distributed_world_size
    # Above 0 before the ranks have begun: somebody else computes here too.
    machine = describe_machine(setup.device) | {"load_of_last_minute": round(os.getloadavg()[0], 1)}
    report = RanksReport(settings.bench, setup, num_ranks, machine, versions())
    paths = {
        freq: [settings.directory / f"{report.work_name}_freq{freq}_rank{number}.json" for number in range(num_ranks)]
        for freq in settings.update_freqs
    }
    for freq in settings.update_freqs:
        if rank == 0:
            progress(f"{settings.updates} updates of {freq} micro-batches on {num_ranks} ranks")
        step, batches = make_step(setup, freq, rank)
        micro_batches = [batches[number % len(batches)] for number in range(freq)]
        trace_updates(step, micro_batches, settings.updates, paths[freq][rank])
    raise_on_every_rank(None)  # all traces are there
    if rank > 0:
        return None
    report.traced.update({freq: [read_updates(path) for path in of_ranks] for freq, of_ranks in paths.items()})
    return report


def make_step(setup: Setup, update_freq: int, rank: int) -> tuple[FairseqStep, list[Batch]]:
    """A trainer for so many micro-batches an update, and text of which each rank starts with another batch."""
    setup.cfg.optimization.update_freq = [update_freq]
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    batches = make_up_text(task, micro_batch_size(setup)).batches
    first = rank % len(batches)
    return FairseqStep.of(setup, f"rank {rank}", ""), batches[first:] + batches[:first]


def trace_updates(step: FairseqStep, micro_batches: Sequence[Batch], updates: int, path: Path) -> None:
    """Record ``updates`` updates, after some that are not, as a Chrome trace."""
    for _ in range(WARMUP_UPDATES):
        step.update(micro_batches)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        for _ in range(updates):
            with record_function(UPDATE):
                step.update(micro_batches)
    with whole_file(str(path)) as unfinished:
        profiled.export_chrome_trace(unfinished)
