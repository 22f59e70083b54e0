"""Checks of 1_correct.sh besides the tests: ``peaks``, ``updates`` of every base recipe, ``resume``. Prints Markdown."""

import argparse
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from fairseq.logging import metrics

import amos_fairseq
from amos_fairseq.composition import RECIPES
from amos_fairseq.errors import UserError, report_user_errors
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
from amos_fairseq.python_process import python_command

# Sequences of an update: enough to run every kernel, and small compared with the memory of any GPU.
SEQUENCES = 8
VOCABULARY = 32_768
UPDATES, SAVED_AT = 8, 4


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
    for dtype in dtypes:
        for edge in edges:
            rate = 2 * edge**3 / matmul_seconds(edge, device, dtype)
            print(f"| {edge} x {edge}, {str(dtype).removeprefix('torch.')} | {rate / 1e12:,.1f} |", flush=True)
    print(f"\ncopy, bytes read and written: {memory_bandwidth(device, size) / 1e12:.2f} TB/s")


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
            row = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} | | | "
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


def resume(device: torch.device, precision: str) -> None:
    """Train 8 updates, resume from the checkpoint of the 4th, and compare weights and optimizer state bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = synthetic_corpus(work)
        train(work / "whole", data, device, precision)
        saved = next((work / "whole").glob(f"checkpoint_*_{SAVED_AT}.pt"), None)
        if saved is None:
            raise UserError(f"the run of {UPDATES} updates has no checkpoint after {SAVED_AT}")
        (work / "continued").mkdir()
        (work / "continued" / "checkpoint_last.pt").write_bytes(saved.read_bytes())
        train(work / "continued", data, device, precision)
        whole, continued = (tensors_of(work / name / "checkpoint_last.pt") for name in ("whole", "continued"))
    if whole.keys() != continued.keys():
        raise UserError("the two checkpoints hold different tensors")
    changed = {name for name, tensor in whole.items() if not torch.equal(tensor, continued[name])}
    print(f"{len(whole)} tensors of model and optimizer after {UPDATES} updates, resumed after {SAVED_AT}: ", end="")
    if changed:
        largest = max((whole[name].double() - continued[name].double()).abs().max().item() for name in changed)
        print(f"{len(changed)} differ, by at most {largest:.3g}: {', '.join(sorted(changed)[:5])}")
        raise UserError("the resumed run differs from the uninterrupted one")
    print("the same bits")


def synthetic_corpus(work: Path) -> Path:
    """Write 400 lines with 150 distinct words, binarized by fairseq's own preprocessing."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=4)) for _ in range(150)]
    lines = [" ".join(generator.choices(words, k=40)) + "\n" for _ in range(400)]
    (work / "train").write_text("".join(lines), encoding="utf-8")
    (work / "valid").write_text("".join(lines[:20]), encoding="utf-8")
    run(
        [
            *python_command("fairseq_cli.preprocess"),
            "--only-source",
            "--destdir",
            str(work / "data"),
            "--trainpref",
            str(work / "train"),
            "--validpref",
            str(work / "valid"),
        ]
    )
    return work / "data"


def train(save_dir: Path, data: Path, device: torch.device, precision: str) -> None:
    settings = {
        "task.data": data,
        "task.tokens_per_sample": 64,
        "model.max_positions": 64,
        "dataset.batch_size": 8,
        "optimization.update_freq": "[1]",
        "optimization.max_update": UPDATES,
        "checkpoint.save_dir": save_dir,
        "checkpoint.save_interval_updates": SAVED_AT,
        "checkpoint.keep_interval_updates": 10,
        "lr_scheduler.warmup_updates": 2,
        "dataset.num_workers": 0,
        "task.precision": precision,
        "common.cpu": str(device.type == "cpu").lower(),
        "common.user_dir": Path(amos_fairseq.__file__).parent,
        "dataset.disable_validation": "true",
        "distributed_training.distributed_world_size": 1,
    }
    run(
        [
            *python_command("fairseq_cli.hydra_train"),
            "--config-dir",
            str(RECIPES),
            "--config-name",
            "amos_tiny",
            *(f"{key}={value}" for key, value in settings.items()),
        ]
    )


def run(command: list[str]) -> None:
    finished = subprocess.run(command, stdout=sys.stderr, check=False)
    if finished.returncode:
        raise UserError(f"{' '.join(command[1:4])} ... ended with status {finished.returncode}; see the log")


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


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("peaks", "updates", "resume"))
    parser.add_argument("precision", nargs="?", choices=("bf16", "fp16"), default="bf16", help="precision of resume")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kernels", choices=("fast", "triton"), default="fast", help="kernels of updates")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.what == "resume":
        resume(device, arguments.precision)
    elif arguments.what == "updates":
        updates(device, arguments.kernels)
    else:
        peaks(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
