"""Checks of fifteen_minutes.sh besides the tests: ``updates`` of every base recipe; ``resume`` and ``graphs``, bit by bit.

They print Markdown. ``host``, on a CPU: what the host does in an update.

``weights`` writes those of a run without the state of its optimizer, in bfloat16: a file that is small enough to travel.
"""

import argparse
import functools
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

# ruff: noqa: E402
# isort: off
import amos_fairseq

amos_fairseq.register()  # before fairseq is imported here, whose logging it keeps quiet

# isort: on
import torch
from fairseq.logging import metrics
from gpu_workload import first_line
from torch import Tensor
from torch.utils import benchmark
from training_step import EagerGraph, FairseqStep, held_bytes, random_batches, set_up, step_peak

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.functional import attention
from amos_fairseq.modules import encoder
from amos_fairseq.recipes import RECIPES
from amos_fairseq.run.graphs import CudaGraph, GraphedUpdates

# Sequences of an update: enough to run every kernel, and small compared with the memory of any GPU.
SEQUENCES = 8
VOCABULARY = 32_768
UPDATES, SAVED_AT = 8, 4
# Of small models, which are those that CUDA graphs are for.
GRAPHED = ("electra_small", "electra_modern_mini", "amos_small", "amos_small model.kernels=triton")
GRAPHED_UPDATES = 12


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
            row = three_updates(recipe, kernels, device, sequences, vocabulary)
        except Exception as error:  # continue with the other recipes
            failed.append(recipe)
            row = f"FAILED: {first_line(error)} | | | "
        print(f"| {recipe} | {kernels} | {row} |", flush=True)
    if failed:
        raise UserError(f"recipes that do not train: {', '.join(failed)}")


def three_updates(recipe: str, kernels: str, device: torch.device, sequences: int, vocabulary: int) -> str:
    metrics.reset()
    precision = "bf16" if device.type == "cuda" else "float32"
    overrides = [f"dataset.batch_size={sequences}", f"model.kernels={kernels}"]
    setup = set_up(recipe, overrides, precision, device.type, vocabulary)
    (batch,) = random_batches(setup, 1)
    step = FairseqStep(setup)
    step.step(batch)
    start = benchmark.timer()  # waits for a GPU
    step.step(batch)
    seconds = benchmark.timer() - start
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
    print(f"{text}{'the same bits' if largest == 0 else f'OTHER bits, by at most {largest:.3g}'}")
    if largest:
        raise UserError("the resumed run differs from the uninterrupted one")


def graphs(device: torch.device) -> None:
    """Train 12 updates twice without and once with ``model.cuda_graphs``, and compare all tensors and logged values bit by bit.

    All with ``model.deterministic=true``. If the two without differ, the third says nothing.
    """
    on_gpu, different = device.type == "cuda", []
    print(
        "| recipe | repeated without graphs | with graphs | seconds of the last update without, with |\n|---|---|---|---|"
    )
    for case in GRAPHED if on_gpu else ("electra_tiny dataset.batch_size=2", "amos_tiny dataset.batch_size=2"):
        first, second, third = (graphed_updates(case, device, graphed) for graphed in (False, False, True))
        words = [describe_difference(first, other) for other in (second, third)]
        different += [case for word in words if word != "the same bits"]
        print(f"| {case} | {words[0]} | {words[1]} | {first['seconds']:.4f}, {third['seconds']:.4f} |", flush=True)
    if different:
        raise UserError(f"updates with other bits: {', '.join(dict.fromkeys(different))}")


def graphed_updates(case: str, device: torch.device, graphed: bool) -> dict[str, object]:
    """Return the tensors behind 12 updates, what each logged, and the time of the last one."""
    metrics.reset()
    recipe, *settings = case.split()
    settings += ["model.deterministic=true", "lr_scheduler.warmup_updates=4"]
    setup = set_up(recipe, settings, "bf16", device.type, VOCABULARY if device.type == "cuda" else 500)
    step, batches = FairseqStep(setup), random_batches(setup)
    if graphed:
        step.trainer.graphed_updates = GraphedUpdates(step.trainer, CudaGraph if device.type == "cuda" else EagerGraph)
    logged, start = [], 0.0
    for update in range(GRAPHED_UPDATES):
        start = benchmark.timer()  # waits for a GPU
        with metrics.aggregate(new_root=True):
            values = step.trainer.train_step([batches[update % len(batches)]])
        logged.append({key: str(value) for key, value in values.items() if key not in ("ups", "gb_free")})
    seconds = benchmark.timer() - start
    return {"tensors": [tensor.detach().cpu() for tensor in step.state()], "logged": logged, "seconds": seconds}


def describe_difference(one: dict[str, object], other: dict[str, object]) -> str:
    pairs = list(zip(one["tensors"], other["tensors"], strict=True))
    largest = max((left.double() - right.double()).abs().max().item() for left, right in pairs)
    updates = [number for number, (a, b) in enumerate(zip(one["logged"], other["logged"], strict=True), 1) if a != b]
    if not largest and not updates:
        return "the same bits"
    return f"OTHER bits, by at most {largest:.3g}; logged otherwise first at update {updates[0] if updates else '-'}"


# electra_small with little to compute.
NARROW = (
    "task.tokens_per_sample=16",
    "model.max_positions=16",
    "model.encoder_embed_dim=64",
    "model.encoder_ffn_embed_dim=64",
)


class Repeated:
    """In place of a CUDA graph: the result of the first call again and again, for what the host does around a graph."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.result = work()

    def replay(self) -> object:
        return self.result


def one_operator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, backend: str
) -> Tensor:
    """Call one operator of a CPU with the context in which CUDA's attention is called."""
    with attention.sdpa_kernel(attention.SDPA_BACKENDS["flash"], set_priority=False):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


@mock.patch.object(attention, "choose_backend", mock.Mock(return_value="flash"))
@mock.patch.object(attention, "fused_attention", one_operator)
@mock.patch.object(encoder, "fast_dropout", functools.partial(torch.dropout, train=True))
def host(recipe: str) -> None:
    """Print the milliseconds of a CPU core in an update at tiny widths, and in what remains of it around a graph.

    Attention and dropout take the operators that they have on CUDA.
    """
    torch.set_num_threads(1)
    setup = set_up(recipe, ["dataset.batch_size=2", *NARROW], "bf16", "cpu", 250)
    for name, graphed in (("an update", False), ("around a graph", True)):
        metrics.reset()
        step, batches = FairseqStep(setup), random_batches(setup)
        if graphed:
            step.trainer.graphed_updates = GraphedUpdates(step.trainer, Repeated)
        seconds = []
        for update in range(205):
            start = time.process_time()
            step.step(batches[update % len(batches)])
            seconds.append(time.process_time() - start)
        median, least = statistics.median(seconds[5:]), min(seconds[5:])
        print(f"{recipe}, {name}: {1e3 * median:.2f} ms of a core (median of 200, least {1e3 * least:.2f})")


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


def write_weights(run: Path, out: Path) -> None:
    """Write what fine-tuning needs of the last checkpoint of a run."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(run / "checkpoint_last.pt", map_location="cpu", weights_only=True)
    state["last_optimizer_state"] = None
    state["model"] = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state["model"].items()
    }
    torch.save(state, out)
    print(f"{len(state['model'])} tensors, {out.stat().st_size / 2**20:.1f} MiB")


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
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("what", choices=("updates", "resume", "graphs", "host", "weights"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--kernels", choices=("fast", "triton"), default="fast", help="model.kernels")
    parser.add_argument("--recipe", help="of resume (default: amos_base, amos_tiny on a CPU)")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16", help="of resume")
    parser.add_argument("--run", type=Path, help="of weights: a save directory")
    parser.add_argument("--out", type=Path, help="of weights: the file")
    arguments = parser.parse_args()
    device, kernels = torch.device(arguments.device), arguments.kernels
    recipe = arguments.recipe or ("amos_base" if device.type == "cuda" else "amos_tiny")
    if arguments.what == "updates":
        updates(device, kernels)
    elif arguments.what == "graphs":
        graphs(device)
    elif arguments.what == "host":
        host(arguments.recipe or "electra_small")
    elif arguments.what == "weights":
        write_weights(arguments.run, arguments.out)
    else:
        resume(device, recipe, arguments.precision, kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
