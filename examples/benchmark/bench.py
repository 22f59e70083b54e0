"""Measure training steps of this package beside the reference implementation and Hugging Face, in turns.

    python examples/benchmark/bench.py electra_small --peer reference hf --set dataset.batch_size=16
    python examples/benchmark/bench.py electra_mini --fine-tuning --threads 1

Pretraining: a step is forward, backward, clipping, optimizer and statistics of one micro-batch (dataset.batch_size sequences of
random tokens), run by fairseq's own trainer. All models take turns, a step each, on the same batches, after a warm-up: a
disturbance of the machine slows all of them. Ratios are taken within a round. Peers: reference is this model with
model.kernels=reference; hf is Hugging Face's ELECTRA (for mlm, its masked language model) of the same sizes at its best;
KEY=VALUE is this model with one more setting, such as model.kernels=triton or model.cuda_graphs=true; KEY=VALUE,KEY=VALUE with
several.

Fine-tuning (--fine-tuning): updates of a classifier in rows/s, with random batches and with batches of similar length, beside a
plain loop with Hugging Face's ELECTRA on the same rows, in float32.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import benchmark
from training_step import (
    DTYPES,
    Batch,
    FairseqStep,
    Setup,
    choose_device,
    held_bytes,
    loaded_tokens_per_second,
    random_batches,
    set_up,
    step_peak,
)

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import write_text
from amos_fairseq.flops import training_flops
from amos_fairseq.models.configuration import PaddedVocabulary
from amos_fairseq.process import version_of

PACKAGES = ("amos_fairseq", "torch", "fairseq-fixed", "transformers", "triton", "numpy")
PROFILED_STEPS, PROFILED_ROWS = 2, 25
# Sizes of the square products: the peak is the fastest of them, because the best size differs between machines.
MATMUL_EDGES = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
PEAK_SECONDS = {"cpu": 1.0, "cuda": 2.0}  # of each size, after as many that are not measured


class Step(Protocol):
    """A training step that is measured; ``module``: everything that is trained."""

    module: nn.Module

    def step(self, batch: Batch) -> None:
        """Update the parameters once with ``batch``, which is on the CPU as a data loader returns it."""

    def state(self) -> Iterator[Tensor]:
        """Yield everything that is held between two steps: weights, gradients, master weights, moments."""


@dataclass
class Contestant:
    """A model that is measured.

    Attributes:
        setup: configuration whose model FLOPs are counted for its steps.
        unequal_work: how its work differs from ours; empty if it does not.
        seconds: of each measured step.
    """

    name: str
    step: Step
    setup: Setup
    unequal_work: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)


def build_contestants(setup: Setup, peers: Sequence[str]) -> list[Contestant]:
    """Build our model, then the peers in their order; a :class:`UserError` if one cannot follow the recipe."""
    contestants = [Contestant("ours", FairseqStep(setup), setup)]
    for peer in dict.fromkeys(peers):
        if peer == "hf":
            contestants.append(hugging_face(setup))
            continue
        if peer != "reference" and "=" not in peer:
            raise UserError(f"--peer {peer} is unknown: give reference, hf or KEY=VALUE")
        changed = setup.cfg.copy()
        OmegaConf.set_struct(changed, True)
        overrides = re.split(r",(?=[\w.]+=)", "model.kernels=reference" if peer == "reference" else peer)
        try:
            changed.merge_with_dotlist(overrides)
        except OmegaConfBaseException as error:  # an unknown key, or a value of another type
            raise UserError(f"--peer {peer}: {str(error).splitlines()[0]}") from error
        changed = dataclasses.replace(setup, cfg=changed)
        contestants.append(Contestant(peer, FairseqStep(changed), changed))
    return contestants


def hugging_face(setup: Setup) -> Contestant:
    # Imported here: transformers takes seconds to import, and not every run needs it.
    from hugging_face_peers import HuggingFaceStep, build_objective, comparable_setup

    comparable, difference = comparable_setup(setup)
    vocabulary = PaddedVocabulary.of(setup.task.source_dictionary)
    torch.manual_seed(setup.cfg.common.seed)
    module = build_objective(comparable.cfg, vocabulary.padded_size, vocabulary.pad)
    return Contestant("hf", HuggingFaceStep(comparable, module), comparable, difference)


def alternate(contestants: Sequence[Contestant], batches: Sequence[Batch], rounds: int) -> None:
    """Measure rounds of one step each: A B C A B C ... All use the same batch in a round."""
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for contestant in contestants:
            start = benchmark.timer()  # waits for a GPU
            contestant.step.step(batches[number % len(batches)])
            contestant.seconds.append(benchmark.timer() - start)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return how many times as fast ``ours`` is in each round, sorted."""
    return sorted(their / our for our, their in zip(ours, theirs, strict=True))


def matmul_peak(device: torch.device, dtype: torch.dtype, edges: Sequence[int] | None = None) -> float:
    """Return the FLOP/s of the fastest square matrix product; a multiplication and an addition are two operations.

    This rate is an upper bound for a training step: the sustained median of products of random normal values. A product
    draws more power the more bits change between its operands, and a GPU at its power limit lowers its clock: an H200,
    measured with another program, multiplied 8192 x 8192 matrices in bf16 at 894 TFLOP/s if they were zeros and at 788 if
    they were random. A GPU lowers its clock only after some hundred milliseconds, so as many seconds before are not measured.
    float32 is PyTorch's default float32 (no TF32).
    """
    peak, seconds = 0.0, PEAK_SECONDS[device.type]
    for edge in edges or MATMUL_EDGES[device.type]:
        operations = 2 * edge**3
        if peak and operations / peak > seconds:  # a slow CPU leaves out the largest product
            break
        left, right = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
        product = benchmark.Timer(
            "torch.mm(left, right, out=out)",
            globals={"torch": torch, "left": left, "right": right, "out": torch.empty_like(left)},
            num_threads=torch.get_num_threads(),
        )
        product.blocked_autorange(min_run_time=seconds)
        peak = max(peak, operations / product.blocked_autorange(min_run_time=seconds).median)
    return peak


@dataclass(frozen=True)
class Result:
    """A row of the table; bytes, tokens/s and FLOP/s without prefixes.

    Attributes:
        tokens_per_second: smallest, median and largest of the steps.
        times_as_fast: ours beside this row, smallest, median and largest of the rounds; None for ours.
        peak_bytes: maximum during a step, ``held_bytes`` included; None if unknown (compiled code on a CPU).
    """

    name: str
    tokens_per_second: tuple[float, float, float]
    times_as_fast: tuple[float, float, float] | None
    fraction_of_peak: float
    held_bytes: int
    peak_bytes: int | None
    parameters: int
    unequal_work: str
    seconds: list[float]


def result_of(contestant: Contestant, ours: Contestant, batch: Batch, peak: float) -> Result:
    setup, step = contestant.setup, contestant.step
    held, maximum = held_bytes(*step.state()), None
    if setup.device.type == "cuda" or not setup.cfg.model.compile:  # compiled code on a CPU hides its tensors
        maximum = held + step_peak(lambda: step.step(batch), setup.device)
    speeds = sorted(batch["ntokens"] / seconds for seconds in contestant.seconds)
    faster = None if contestant is ours else spread(ratios(ours.seconds, contestant.seconds))
    flops = training_flops(setup.cfg, setup.vocabulary_size, reference=True).per_token
    return Result(
        name=contestant.name,
        tokens_per_second=spread(speeds),
        times_as_fast=faster,
        fraction_of_peak=flops * statistics.median(speeds) / peak,
        held_bytes=held,
        peak_bytes=maximum,
        parameters=sum(parameter.numel() for parameter in step.module.parameters()),
        unequal_work=contestant.unequal_work,
        seconds=contestant.seconds,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the smallest value, the median and the largest one."""
    return min(values), statistics.median(values), max(values)


def measure_pretraining(setup: Setup, peers: Sequence[str], rounds: int, warmup: int) -> dict[str, Any]:
    """Return plain values: rows of :class:`Result`, and the machine's limits."""
    batches = random_batches(setup)
    try:
        progress("building the models")
        contestants = build_contestants(setup, peers)
        alternate(contestants, batches, max(warmup, 1))  # the first step compiles, and creates the optimizer's moments
        for contestant in contestants:
            contestant.seconds.clear()
        alternate(contestants, batches, rounds)
        progress("limits of the machine")
        peak = matmul_peak(setup.device, setup.dtype)
        progress("memory of a step")
        results = [result_of(each, contestants[0], batches[0], peak) for each in contestants]
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{setup.batch_size} sequences of {setup.cfg.task.tokens_per_sample} tokens for all models do not fit into the "
            "memory of the GPU: lower dataset.batch_size with --set, or give fewer peers"
        ) from error
    return {
        "sequences": setup.batch_size,
        "tokens_per_sequence": setup.cfg.task.tokens_per_sample,
        "vocabulary_rows": PaddedVocabulary.of(setup.task.source_dictionary).padded_size,
        "precision": setup.precision,
        "matmul_peak": peak,
        "loaded_tokens_per_second": loaded_tokens_per_second(setup),
        "rows": [dataclasses.asdict(result) for result in results],
    }


def pretraining_page(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    rows = report["rows"]
    yield (
        f"{report['sequences']} sequences of {report['tokens_per_sequence']} tokens, {report['vocabulary_rows']:,} vocabulary "
        f"rows, {report['precision']}, {len(rows[0]['seconds'])} rounds; matrix peak {report['matmul_peak'] / 1e12:.3g} TFLOP/s"
    )
    yield ""
    yield "| model | tokens/s | least to most | ours is faster by | of the peak | memory held | at most | parameters |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        low, median, high = row["tokens_per_second"]
        maximum = "not seen" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f} MiB"
        yield (
            f"| {row['name']} | {median:,.0f} | {low:,.0f} to {high:,.0f} | {ratio_cell(row['times_as_fast'])} | "
            f"{row['fraction_of_peak']:.0%} | {row['held_bytes'] / 2**20:,.0f} MiB | {maximum} | {row['parameters']:,} |"
        )
    for row in rows:
        if row["unequal_work"]:
            yield f"\n{row['name']}: {row['unequal_work']}."
    speed = report["loaded_tokens_per_second"]
    needed = -int(-rows[0]["tokens_per_second"][1] // speed)
    yield f"\nOne loader process makes {speed:,.0f} tokens/s; {needed} needed to keep up with ours."


def ratio_cell(ratio: Sequence[float] | None) -> str:
    return "" if ratio is None else f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"


def profile_step(setup: Setup) -> str:
    """Return torch.profiler's table of the operators of our step, by their own time (that of their kernels on a GPU)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler prints its start and end
    step, batches = FairseqStep(setup), random_batches(setup)
    step.step(batches[0])
    activities = [ProfilerActivity.CPU]
    if setup.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiled:
        for batch in batches[:PROFILED_STEPS]:
            step.step(batch)
        benchmark.timer()  # waits for a GPU
    order = f"self_{setup.device.type}_time_total"
    return profiled.key_averages().table(sort_by=order, row_limit=PROFILED_ROWS, max_name_column_width=60)


def measure_fine_tuning(setup: Setup, data: str, rounds: int, warmup: int) -> dict[str, Any]:
    """Measure both loops with random batches, then with batches of similar length; see :mod:`fine_tuning_loops`."""
    from fine_tuning_loops import Loops

    if setup.cfg.model.get("relative_position_scheme", "none") != "none":
        raise UserError(
            "Hugging Face's ELECTRA has no relative positions: give a recipe such as electra_small, or --set "
            "model.relative_position_scheme=none"
        )
    rows = []
    for similar_lengths in (False, True):
        with Loops.built(setup, data, similar_lengths) as loops:
            steps = []
            for number in range(warmup + rounds):
                progress(f"{'similar lengths' if similar_lengths else 'random batches'}: update {number + 1}")
                start = clock(setup.device)
                batch = loops.update_ours()
                middle = clock(setup.device)
                loops.peer.update(batch["id"].tolist())
                steps.append((batch, middle - start, clock(setup.device) - middle))
        measured, ours, theirs = zip(*steps[warmup:], strict=True)
        positions = sum(batch["net_input"]["src_tokens"].numel() for batch in measured)
        count = sum(batch["nsentences"] for batch in measured)
        rows.append(
            {
                "batches": "similar lengths" if similar_lengths else "random",
                "padding": 1 - sum(batch["ntokens"] for batch in measured) / positions,
                "ours_rows_per_second": count / sum(ours),
                "hf_rows_per_second": count / sum(theirs),
                "times_as_fast": spread(ratios(ours, theirs)),
            }
        )
    return {"rows_of": data or "synthetic rows", "rows": rows}


def clock(device: torch.device) -> float:
    """Return seconds: on a CPU those of this process, which another program does not lengthen."""
    return time.process_time() if device.type == "cpu" else benchmark.timer()


def fine_tuning_page(report: dict[str, Any]) -> Iterator[str]:
    yield f"Updates of a classifier on {report['rows_of']}, float32; on a CPU by CPU seconds of the process"
    yield ""
    yield "| batches | padding | ours, rows/s | hf, rows/s | ours is faster by |"
    yield "|---|---:|---:|---:|---:|"
    for row in report["rows"]:
        yield (
            f"| {row['batches']} | {row['padding']:.0%} | {row['ours_rows_per_second']:,.0f} | "
            f"{row['hf_rows_per_second']:,.0f} | {ratio_cell(row['times_as_fast'])} |"
        )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions for the page."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
    }


def progress(text: str) -> None:
    """Overwrite one line of a terminal; print nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.py", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="recipe such as amos_base, path of a YAML file, checkpoint, or SAVE_DIR")
    add("--peer", dest="peers", nargs="+", action="extend", metavar="NAME", default=[], help="reference, hf, KEY=VALUE")
    add(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        metavar="KEY=VALUE",
        default=[],
        help="settings to change",
    )
    add("--precision", choices=DTYPES, help="dtype of the step; None: that of the recipe here")
    add("--device", choices=("cpu", "cuda"), help="None: cuda if there is a GPU, else cpu")
    add("--steps", type=int, metavar="N", default=20, help="measured rounds")
    add("--warmup", type=int, metavar="N", default=5, help="unmeasured rounds before these")
    add("--threads", type=int, metavar="N", help="CPU threads; None: PyTorch's choice")
    add("--vocabulary-size", type=int, metavar="N", help="dictionary entries; None: that of task.data, or 32,768")
    text = "measure fine-tuning on the prepared classification DATA, or on synthetic rows"
    add("--fine-tuning", nargs="?", const="", metavar="DATA", help=text)
    add("--profile", action="store_true", help="also print the operators that take most of our pretraining step")
    add("--json", type=Path, metavar="FILE", help="also write all values there, with the seconds of every step")
    arguments = parser.parse_args(words)
    for name, minimum in (("steps", 1), ("warmup", 0), ("threads", 1)):
        value = getattr(arguments, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name} {value} must be at least {minimum}")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UserError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    if arguments.fine_tuning is not None and (arguments.peers or arguments.profile or arguments.precision):
        raise UserError("--fine-tuning has one peer, in float32: leave out --peer, --profile and --precision")
    return arguments


def run(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure what the command line describes; print the page and return its values."""
    arguments = parse_arguments(words)
    choose_device(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    is_fine_tuning = arguments.fine_tuning is not None
    precision = "float32" if is_fine_tuning else arguments.precision
    setup = set_up(arguments.recipe, arguments.overrides, precision, arguments.device, arguments.vocabulary_size)
    if is_fine_tuning:
        report = measure_fine_tuning(setup, arguments.fine_tuning, arguments.steps, arguments.warmup)
        page = fine_tuning_page(report)
    else:
        report = measure_pretraining(setup, arguments.peers, arguments.steps, arguments.warmup)
        page = pretraining_page(report)
    report = {"recipe": arguments.recipe, "settings": arguments.overrides} | report
    report["machine"] = describe_machine(setup.device)
    progress("")
    print(f"# {arguments.recipe} {' '.join(arguments.overrides)}".rstrip(), *page, sep="\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value is not None))
    if arguments.profile:
        print(profile_step(setup))
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(report, indent=2) + "\n")
    return report


@report_user_errors()
def main(words: Sequence[str] | None = None) -> int:
    run(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
