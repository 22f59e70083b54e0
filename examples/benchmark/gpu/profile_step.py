"""Profile of a step: its parts beside their prediction, its most expensive kernels, and the gaps between them. Prints Markdown.

The prediction is that of ``amos bench --on-paper`` for this GPU, for an H200 if it is not known, made in a separate process
without a GPU. ``--trace FILE.json.gz`` saves the profiled steps for chrome://tracing or ui.perfetto.dev.
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.measure.configuration import BenchSettings, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, random_batch
from amos_fairseq.measure.gpu_rates import DEVICES
from amos_fairseq.measure.measurement import sustained_seconds, synchronize
from amos_fairseq.measure.on_paper import predict_step
from amos_fairseq.measure.step_profile import PARTS, shares_of_parts

WARMUP = 5
PROFILED = {"cuda": 5, "cpu": 1}  # steps
SECONDS = {"cuda": 4.0, "cpu": 0.1}
NAME_LENGTH = 110  # of a kernel; templates are longer than a line
TRACE_BYTES = 15 * 2**20
PREDICTION_SECONDS = 60  # of waiting for it
SHOWN_GAPS = 5
# Share of a step. A GPU that waits for longer gains from CUDA graphs, torch.compile or larger batches.
LARGEST_IDLE = 0.05


def paper_device(name: str) -> tuple[str, str]:
    """Return the key in DEVICES of a GPU by its name in PyTorch, and a label: "H200", or "H200; L40S is not known"."""
    found = next((key for key in DEVICES if re.search(rf"{key}(?!\d)", name.lower())), None)  # not the RTX A1000
    return (found, DEVICES[found].name) if found else ("h200", f"{DEVICES['h200'].name}; {name} is not known")


def measure(settings: BenchSettings, num_kernels: int, trace: Path | None) -> None:
    setup = set_up(settings)
    on_gpu = setup.device.type == "cuda"
    key, label = paper_device(torch.cuda.get_device_name(setup.device) if on_gpu else "a CPU")
    prediction = start_prediction(settings, key)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    sequences = setup.batch_size
    batch = random_batch(task, sequences)
    step = FairseqStep(setup, task)
    predicted = predicted_parts(prediction)  # waits, so that the process does not disturb the timing
    for _ in range(WARMUP if on_gpu else 1):
        step.step(batch)
    seconds = sustained_seconds(lambda: step.step(batch), setup.device, SECONDS[setup.device.type])
    print(f"{settings.config}, {sequences} sequences, {setup.precision}: {seconds * 1e3:.2f} ms a step, ", end="")
    print(f"{batch['ntokens'] / seconds:,.0f} tokens/s\n", flush=True)
    steps = PROFILED[setup.device.type]
    print_parts(shares_of_parts(step, batch, setup.device, steps), seconds, predicted, label)
    profiled = profile_steps(step, batch, setup.device, steps)
    events = device_events(profiled.events(), on_gpu)
    print_gaps(gaps_of(events), seconds, steps)
    print_kernels(events, steps, num_kernels, on_gpu)
    total = f"predicted for {label}: {sum(predicted.values()):.1f}" if predicted else "the prediction failed"
    print(f"\nDecided: a step of {settings.config}, {sequences} sequences: {seconds * 1e3:.1f} ms; {total}")
    if trace is not None:  # last: a failure here loses nothing else
        print(f"\n{steps} steps: {save_trace(profiled, trace)}", flush=True)


def start_prediction(settings: BenchSettings, device: str) -> subprocess.Popen:
    """Start the process that predicts while the measurement is prepared."""
    command = [sys.executable, __file__, settings.config, "--predict", device, "--precision", settings.precision]
    command += ["--set", *settings.overrides] if settings.overrides else []
    command += [] if settings.vocabulary_size is None else ["--vocabulary-size", str(settings.vocabulary_size)]
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True)


def predicted_parts(process: subprocess.Popen) -> dict[str, float] | None:
    """Return milliseconds by part; None if the prediction failed, with the reason on stderr."""
    try:
        written, _ = process.communicate(timeout=PREDICTION_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the prediction takes more than {PREDICTION_SECONDS} s", file=sys.stderr)
        process.kill()
        process.communicate()
    return None if process.returncode else json.loads(written.splitlines()[-1])


def prediction_as_json(settings: BenchSettings, device: str) -> str:
    """Return milliseconds by part; some parts have two rows in the prediction."""
    milliseconds = dict.fromkeys(PARTS, 0.0)
    for row, cost in predict_step(settings, device).costs.items():
        milliseconds[next(part for part in PARTS if row.startswith(part))] += cost.seconds * 1e3
    return json.dumps(milliseconds)


def print_parts(shares: dict[str, float], seconds: float, predicted: dict[str, float] | None, label: str) -> None:
    print(f"| part | ms, measured | ms, predicted ({label}) |\n|---|---:|---:|")
    for part in PARTS:
        print(
            f"| {part} | {shares[part] * seconds * 1e3:.2f} | {f'{predicted[part]:.2f}' if predicted else 'failed'} |"
        )
    total = f"{sum(predicted.values()):.2f}" if predicted else "failed"
    print(f"| total | {seconds * 1e3:.2f} | {total} |\n", flush=True)


def profile_steps(step: FairseqStep, batch: dict, device: torch.device, steps: int) -> profile:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            step.step(batch)
        synchronize(device)
    return profiled


def device_events(events: Sequence[FunctionEvent], on_gpu: bool) -> list[FunctionEvent]:
    """Return what the GPU ran; on a CPU all operators."""
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [event for event in events if event.device_type == kind and not event.is_user_annotation]


def save_trace(profiled: profile, file: Path) -> str:
    """Write the trace with gzip, unless it is larger than :data:`TRACE_BYTES`; return what was done."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(whole))
        packed = gzip.compress(whole.read_bytes())
    if len(packed) > TRACE_BYTES:
        return f"the trace is not saved, it has {len(packed) / 2**20:.0f} MiB"
    file.write_bytes(packed)
    return file.name


class Gaps(NamedTuple):
    """When a device was busy: microseconds.

    Attributes:
        busy: at least one kernel ran.
        span: from the start of the first kernel to the end of the last.
        gaps: length of each gap, and the name of the kernel behind it; longest first.
    """

    busy: float
    span: float
    gaps: list[tuple[float, str]]


def gaps_of(events: Sequence[FunctionEvent]) -> Gaps:
    """Find the times in which none of the events runs; they may overlap, on several streams or as nested operators."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    gaps: list[tuple[float, str]] = []
    start = end = ordered[0].time_range.start
    for event in ordered:
        if event.time_range.start > end:
            gaps.append((event.time_range.start - end, event.name))
        end = max(end, event.time_range.end)
    span = end - start
    return Gaps(span - sum(length for length, _ in gaps), span, sorted(gaps, reverse=True))


def print_gaps(found: Gaps, seconds: float, steps: int) -> None:
    """Print the idle share while profiled, when the host is slower, and that of an unprofiled step with the same kernels."""
    profiled = 1 - found.busy / found.span
    idle = max(0.0, 1 - found.busy / steps / 1e6 / seconds)
    print(f"Idle between kernels: {idle:.1%} of a step; {profiled:.1%} while the host also wrote the profile. ", end="")
    print("The longest gaps of the profile:\n\n| microseconds | before |\n|---:|---|")
    for length, name in found.gaps[:SHOWN_GAPS]:
        print(f"| {length:.0f} | `{short_name(name)}` |")
    answer = "yes" if idle <= LARGEST_IDLE else "NO"
    print(f"\nDecided: the host launches fast enough: {answer}, the device is idle for {idle:.1%} of a step\n")


def print_kernels(events: Sequence[FunctionEvent], steps: int, num_kernels: int, on_gpu: bool) -> None:
    """Print the kernels with the most time on the device; on a CPU the operators."""
    times: dict[str, list[float]] = {}
    for event in events:
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times.setdefault(event.name, []).append(own / 1e3 / steps)
    total = sum(map(sum, times.values()))
    print(f"{'Kernels' if on_gpu else 'Operators'} of a step: {total:.2f} ms on the device\n")
    print("| ms | share | calls | name |\n|---:|---:|---:|---|")
    for name, own in sorted(times.items(), key=lambda item: -sum(item[1]))[:num_kernels]:
        print(f"| {sum(own):.3f} | {sum(own) / total:.1%} | {len(own) / steps:.0f} | `{short_name(name)}` |")


def short_name(name: str) -> str:
    return name.replace("|", "\\|")[:NAME_LENGTH]


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--vocabulary-size", type=int, help="entries (default: those of the data, or 32768)")
    parser.add_argument("--kernels", type=int, default=40, help="rows of the table")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[])
    parser.add_argument("--trace", type=Path, metavar="FILE.json.gz", help="save the profiled steps")
    parser.add_argument("--predict", choices=tuple(DEVICES), help="print the prediction for this GPU as JSON")
    arguments = parser.parse_args()
    if arguments.kernels < 1:
        raise UserError(f"--kernels {arguments.kernels} is not possible: give at least 1")
    settings = BenchSettings(
        arguments.config,
        arguments.overrides,
        precision=arguments.precision,
        device=arguments.device,
        vocabulary_size=arguments.vocabulary_size,
    )
    if arguments.predict:
        print(prediction_as_json(settings, arguments.predict))
    else:
        measure(settings, arguments.kernels, arguments.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
