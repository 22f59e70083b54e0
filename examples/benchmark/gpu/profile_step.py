"""Profile of a step: its most expensive kernels, and its parts beside their prediction. Prints Markdown.

The prediction is that of ``amos bench --on-paper h200``, made in a separate process without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.measure.configuration import BenchSettings, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, random_batch
from amos_fairseq.measure.measurement import sustained_seconds, synchronize
from amos_fairseq.measure.on_paper import predict_step
from amos_fairseq.measure.step_profile import PARTS, shares_of_parts

WARMUP, PROFILED = 5, 3
SECONDS = {"cuda": 4.0, "cpu": 0.1}
NAME_LENGTH = 110  # of a kernel; templates are longer than a line


def measure(settings: BenchSettings, num_kernels: int) -> None:
    prediction = start_prediction(settings)
    setup = set_up(settings)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    sequences = setup.batch_size
    batch = random_batch(task, sequences)
    step = FairseqStep(setup, task)
    predicted = predicted_parts(prediction)  # waits, so that the process does not disturb the timing
    for _ in range(WARMUP if setup.device.type == "cuda" else 1):
        step.step(batch)
    seconds = sustained_seconds(lambda: step.step(batch), setup.device, SECONDS[setup.device.type])
    print(f"{settings.config}, {sequences} sequences, {setup.precision}: {seconds * 1e3:.2f} ms a step, ", end="")
    print(f"{batch['ntokens'] / seconds:,.0f} tokens/s\n", flush=True)
    print_parts(shares_of_parts(step, batch, setup.device, PROFILED), seconds, predicted)
    print_kernels(step, batch, setup.device, num_kernels)


def start_prediction(settings: BenchSettings) -> subprocess.Popen:
    """Start the process that predicts while the measurement is prepared."""
    command = [sys.executable, __file__, settings.config, "--predict", "--precision", settings.precision]
    command += ["--set", *settings.overrides]
    command += [] if settings.vocabulary_size is None else ["--vocabulary-size", str(settings.vocabulary_size)]
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True)


def predicted_parts(process: subprocess.Popen) -> dict[str, float] | None:
    """Return milliseconds by part on an H200; None if the prediction failed, with the reason on stderr."""
    written, _ = process.communicate()
    return None if process.returncode else json.loads(written.splitlines()[-1])


def prediction_as_json(settings: BenchSettings) -> str:
    """Return milliseconds by part; some parts have two rows in the prediction."""
    milliseconds = dict.fromkeys(PARTS, 0.0)
    for row, cost in predict_step(settings, "h200").costs.items():
        milliseconds[next(part for part in PARTS if row.startswith(part))] += cost.seconds * 1e3
    return json.dumps(milliseconds)


def print_parts(shares: dict[str, float], seconds: float, predicted: dict[str, float] | None) -> None:
    print("| part | ms, measured | ms, predicted for an H200 |\n|---|---:|---:|")
    for part in PARTS:
        print(
            f"| {part} | {shares[part] * seconds * 1e3:.2f} | {f'{predicted[part]:.2f}' if predicted else 'failed'} |"
        )
    total = f"{sum(predicted.values()):.2f}" if predicted else "failed"
    print(f"| total | {seconds * 1e3:.2f} | {total} |\n", flush=True)


def print_kernels(step: FairseqStep, batch: dict, device: torch.device, num_kernels: int) -> None:
    """Print the kernels with the most time on the device; on a CPU the operators."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(PROFILED):
            step.step(batch)
        synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type == kind and not event.is_user_annotation:
            own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            times.setdefault(event.name, []).append(own / 1e3 / PROFILED)
    total = sum(map(sum, times.values()))
    print(f"{'Kernels' if on_gpu else 'Operators'} of a step: {total:.2f} ms on the device\n")
    print("| ms | share | calls | name |\n|---:|---:|---:|---|")
    for name, own in sorted(times.items(), key=lambda item: -sum(item[1]))[:num_kernels]:
        short = name.replace("|", "\\|")[:NAME_LENGTH]
        print(f"| {sum(own):.3f} | {sum(own) / total:.1%} | {len(own) / PROFILED:.0f} | `{short}` |")


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--vocabulary-size", type=int, help="entries (default: those of the data, or 32768)")
    parser.add_argument("--kernels", type=int, default=40, help="rows of the table")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[])
    parser.add_argument("--predict", action="store_true", help="print the prediction as JSON")
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
        print(prediction_as_json(settings))
    else:
        measure(settings, arguments.kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
