"""Checks of 1_correct.sh and 2_triton.sh besides the tests: ``updates`` of every base recipe, ``resume``, ``bits``, ``peaks``.

Prints Markdown; lines ``Decided: TEXT`` are what a check decided.
"""

import argparse
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from fairseq.logging import metrics
from gpu_workload import DROPOUT, attention_leaves, first_line, name_of, sizes_on
from torch import Tensor

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.functional.attention import (
    AttentionBias,
    ToeplitzBias,
    fast_attention,
    prepare_bias,
    toeplitz_attention,
)
from amos_fairseq.functional.relative_position import toeplitz
from amos_fairseq.measure import measurement
from amos_fairseq.measure.configuration import BenchSettings, build_task, set_up
from amos_fairseq.measure.fairseq_step import FairseqStep, random_batch
from amos_fairseq.measure.measurement import (
    describe_machine,
    held_bytes,
    matmul_seconds,
    memory_bandwidth,
    seconds_of,
    step_peak,
    versions,
)
from amos_fairseq.recipes.composition import RECIPES

# Sequences of an update: enough to run every kernel, and small compared with the memory of any GPU.
SEQUENCES = 8
VOCABULARY = 32_768
UPDATES, SAVED_AT = 8, 4
# Atomic additions change their order from run to run: with 5 runs, a kernel that has them is seen.
RUNS = {"cuda": 5, "cpu": 2}


def peaks(device: torch.device) -> None:
    """Measure the peaks that amos bench divides by, 2 seconds for each size."""
    described = describe_machine(device)
    name = described["gpu"]["name"] if described["gpu"] else described["processor"]
    print(f"{name}; {', '.join(f'{package} {version}' for package, version in versions().items())}\n")
    edges, size = measurement.MATMUL_EDGES[device.type], None
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if device.type == "cpu":
        edges, size, dtypes, measurement.SECONDS = (64,), 2**20, (torch.float32,), {"cpu": 0.05}
    print("| random normal numbers | TFLOP/s |\n|---|---:|")
    fastest: dict[torch.dtype, float] = {}
    for dtype in dtypes:
        for edge in edges:
            rate = 2 * edge**3 / matmul_seconds(edge, device, dtype) / 1e12
            fastest[dtype] = max(rate, fastest.get(dtype, 0.0))
            print(f"| {edge} x {edge}, {name_of(dtype)} | {rate:,.1f} |", flush=True)
    products = ", ".join(f"{name_of(dtype)} {rate:,.1f}" for dtype, rate in fastest.items())
    copy = memory_bandwidth(device, size) / 1e12
    print(f"\nDecided: peaks of {name}: {products} TFLOP/s; copy {copy:.2f} TB/s read and written")


def updates(device: torch.device, kernels: str) -> None:
    """Time the second update of every recipe, and print loss and memory of a third; raise if a value is not finite."""
    size, sequences, vocabulary = ("base", SEQUENCES, VOCABULARY) if device.type == "cuda" else ("tiny", 2, 500)
    recipes = sorted(path.stem for path in RECIPES.glob("*.yaml") if f"_{size}" in path.stem)
    if not recipes:
        raise UserError(f"no recipe of size {size} in {RECIPES}")
    failed = []
    print("| recipe | kernels | loss | gradient norm | seconds | memory at peak, GiB |\n|---|---|---:|---:|---:|---:|")
    for recipe in recipes:
        try:
            row = two_updates(recipe, kernels, device, sequences, vocabulary)
        except Exception as error:  # continue with the other recipes
            failed.append(recipe)
            row = f"FAILED: {first_line(error)} | | | "
        print(f"| {recipe} | {kernels} | {row} |", flush=True)
    if failed:
        raise UserError(f"recipes that do not train: {', '.join(failed)}")


def two_updates(recipe: str, kernels: str, device: torch.device, sequences: int, vocabulary: int) -> str:
    metrics.reset()
    precision = "bf16" if device.type == "cuda" else "float32"
    overrides = [f"dataset.batch_size={sequences}", f"model.kernels={kernels}"]
    settings = BenchSettings(recipe, overrides, precision=precision, device=device.type, vocabulary_size=vocabulary)
    setup = set_up(settings)
    task = build_task(setup.cfg.task, vocabulary)
    batch = random_batch(task, sequences)
    step = FairseqStep(setup, task)
    step.step(batch)
    seconds = seconds_of(lambda: step.step(batch), device)
    held = held_bytes(*step.state())
    with metrics.aggregate(new_root=True) as found:
        peak = held + step_peak(lambda: step.trainer.train_step([batch]), device)
    values = found.get_smoothed_values()
    loss, norm = float(values["loss"]), float(values["gnorm"])
    if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
        raise ValueError(f"loss {loss}, gradient norm {norm}")
    return f"{loss:.3f} | {norm:.3f} | {seconds:.3f} | {peak / 2**30:.2f}"


def resume(device: torch.device, recipe: str, precision: str, kernels: str) -> None:
    """Train 8 updates by ``amos train``, resume from the checkpoint of the 4th, and compare all tensors bit by bit.

    The corpus of generated words is prepared by ``amos prepare text``. An update has two micro-batches; of amos_base an
    epoch has 5 updates. ``kernels=fast`` trains with ``model.deterministic=true``, ``triton`` without: docs/precision.md claims
    the same bits for both, so any difference is an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = prepared_corpus(work)
        settings = training_settings(data, device, recipe, precision, kernels)
        train(recipe, work / "whole", settings)
        saved = next((work / "whole").glob(f"checkpoint_*_{SAVED_AT}.pt"), None)
        if saved is None:
            raise UserError(f"the run of {UPDATES} updates has no checkpoint after {SAVED_AT}")
        (work / "continued").mkdir()
        saved.rename(work / "continued" / "checkpoint_last.pt")
        train(recipe, work / "continued", settings)
        whole, continued = (tensors_of(work / name / "checkpoint_last.pt") for name in ("whole", "continued"))
        largest = largest_difference(whole, continued)
    setting = "model.deterministic=true" if kernels == "fast" else f"kernels={kernels}"
    text = f"{recipe}, {precision}, {setting}: after {UPDATES} updates, resumed after {SAVED_AT}, "
    text += f"{len(whole)} tensors of model and optimizer have "
    print(f"Decided: {text}{'the same bits' if largest == 0 else f'OTHER bits, by at most {largest:.3g}'}")
    if largest:
        raise UserError("the resumed run differs from the uninterrupted one")


def training_settings(
    data: Path, device: torch.device, recipe: str, precision: str, kernels: str
) -> dict[str, str | int | Path]:
    return {
        "task.data": data,
        "model.kernels": kernels,
        "model.deterministic": str(kernels == "fast").lower(),
        "dataset.batch_size": 4,
        "optimization.update_freq": "[2]",
        "optimization.max_update": UPDATES,
        "checkpoint.save_interval_updates": SAVED_AT,
        "lr_scheduler.warmup_updates": 2,
        "dataset.num_workers": 0,
        "task.precision": precision,
        "common.cpu": str(device.type == "cpu").lower(),
        "dataset.disable_validation": "true",
        "distributed_training.distributed_world_size": 1,
    }


def prepared_corpus(work: Path) -> Path:
    """Write 500 paragraphs with 150 distinct words, and prepare them: 45 blocks of 512 tokens, 361 of 64."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=4)) for _ in range(150)]
    lines = [" ".join(generator.choices(words, k=25)) + "\n" for _ in range(500)]
    (work / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    run(["amos", "prepare", "text", work / "text.txt", "--out", work / "data", "--vocab-size", 200])
    return work / "data"


def train(recipe: str, save_dir: Path, settings: dict[str, str | int | Path]) -> None:
    assignments = [f"{key}={value}" for key, value in settings.items()]
    run(["amos", "train", recipe, f"checkpoint.save_dir={save_dir}", *assignments])


def run(command: list[object]) -> None:
    """Run a command; its output goes to the log."""
    words = [str(word) for word in command]
    finished = subprocess.run(words, stdout=sys.stderr, check=False)
    if finished.returncode:
        raise UserError(f"{' '.join(words[:3])} ... ended with status {finished.returncode}; see the log")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two checkpoints; 0 if all bits are the same."""
    if one.keys() != other.keys():
        raise UserError("the two checkpoints hold different tensors")
    changed = {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
    return max(((one[name].double() - other[name].double()).abs().max().item() for name in changed), default=0.0)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its path in the nested state."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    found: dict[str, torch.Tensor] = {}

    def collect(name: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                collect(f"{name}.{key}", part)
        elif isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                collect(f"{name}.{number}", part)

    for part in ("model", "last_optimizer_state"):
        collect(part, state[part])
    return found


def bits(device: torch.device, kernels: str) -> None:
    """Run attention of amos_base with a learned bias and dropout several times, and compare output and gradients bit by bit.

    ``kernels=fast`` may differ, ``triton`` must not: its sums have a fixed order. On a CPU ``triton`` needs TRITON_INTERPRET=1.
    """
    on_gpu = device.type == "cuda"
    if kernels == "triton" and not on_gpu and find_spec("triton") is None:
        print("Decided: attention with kernels=triton was not run: Triton is not installed")
        return
    sizes = sizes_on(device)
    heads, values = attention_leaves(sizes, device)
    grad = torch.randn_like(heads[:, :, 0])

    def attend() -> Tensor:
        if kernels == "triton":
            return toeplitz_attention(heads, ToeplitzBias(values, None), DROPOUT, None)
        bias = prepare_bias(AttentionBias(learned=toeplitz(values)), device, sizes.dtype)
        return fast_attention(heads, bias, DROPOUT)

    def once() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        out = attend()
        return out.detach(), *torch.autograd.grad(out, (heads, values), grad)

    runs = RUNS[device.type]
    differences = differences_of_runs(once, runs)
    print(f"{sizes}, dropout {DROPOUT}, kernels={kernels}, {runs} runs\n")
    print("| tensor | largest value | largest difference |\n|---|---:|---:|")
    names = ("output", "gradient of the heads", "gradient of the bias")
    for name, (size, difference) in zip(names, differences, strict=True):
        print(f"| {name} | {size:.3g} | {f'{difference:.3g}' if difference else 'the same bits'} |")
    changed = [name for name, (_, difference) in zip(names, differences, strict=True) if difference]
    print(f"\nDecided: {runs} runs of attention with kernels={kernels} give ", end="")
    print(f"OTHER bits: {', '.join(changed)}" if changed else "the same bits")
    if changed and kernels == "triton":
        raise UserError("the Triton kernels do not give the same bits twice")


def differences_of_runs(once: Callable[[], tuple[Tensor, ...]], runs: int) -> list[tuple[float, float]]:
    """Return the largest absolute value of each tensor, and its largest difference in later runs from the first."""
    first = once()
    largest = [0.0] * len(first)
    for _ in range(runs - 1):
        for number, (one, other) in enumerate(zip(first, once(), strict=True)):
            if not torch.equal(one, other):
                difference = (one.double() - other.double()).abs().nan_to_num(nan=math.inf).max().item()
                largest[number] = max(largest[number], difference)
    return [(tensor.abs().max().item(), each) for tensor, each in zip(first, largest, strict=True)]


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("updates", "resume", "bits", "peaks"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kernels", choices=("fast", "triton"), default="fast", help="of updates, resume and bits")
    parser.add_argument("--recipe", help="of resume (default: amos_base, amos_tiny on a CPU)")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16", help="of resume")
    arguments = parser.parse_args()
    device, kernels = torch.device(arguments.device), arguments.kernels
    recipe = arguments.recipe or ("amos_base" if device.type == "cuda" else "amos_tiny")
    checks = {
        "updates": partial(updates, device, kernels),
        "resume": partial(resume, device, recipe, arguments.precision, kernels),
        "bits": partial(bits, device, kernels),
        "peaks": partial(peaks, device),
    }
    checks[arguments.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
