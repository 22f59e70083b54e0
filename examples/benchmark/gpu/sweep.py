"""Find the fastest launch constants of each Triton kernel of this package: tiles, warps and stages. Prints Markdown.

    python sweep.py compile --until TIME --part 0 --parts 4     # only fills Triton's cache; each part in a process
    python sweep.py sweep --out OUT --until TIME                # writes OUT/sweep.jsonl and OUT/tuned_launches.json

``sweep`` runs :func:`launches_to_try` one after the other at the shapes of amos_base. One must compute what the default
computes before its time counts. Each is recorded at once, and the table is written after each kernel. On a CPU the kernels need
TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_workload import DROPOUT, Sizes, attention_leaves, first_line, sizes_on
from torch import Tensor
from torch.utils import benchmark

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.functional.attention import ToeplitzBias, toeplitz_attention

# Norm of the difference from the default's result, relative to its norm: sums in another order, rounded to the 8 bits of
# bfloat16 (2^-9 of each value at most, once or twice). A wrong tile is wrong by far more.
TOLERANCE = 0.01
SECONDS, FINAL_SECONDS = 0.12, 0.6  # of the timing of a candidate, and of the fastest ones again
FINALISTS = 3
LEAST_GAIN = 1.02  # a smaller one is noise
SHOWN = 5

Launch = dict[str, int]
Table = dict[str, dict[str, dict[str, Launch]]]


class Workload(NamedTuple):
    """Calls of one kernel: ``call`` is timed, ``result`` computes what is compared."""

    call: Callable[[], object]
    result: Callable[[], tuple[Tensor, ...]]


def attention_forward(sizes: Sizes, device: torch.device) -> Workload:
    heads, bias = (leaf.detach() for leaf in attention_leaves(sizes, device))

    def result() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return (attend(heads, bias),)

    return Workload(lambda: attend(heads, bias), result)


def attention_backward(sizes: Sizes, device: torch.device) -> Workload:
    leaves = attention_leaves(sizes, device)
    out = attend(*leaves)
    grad = torch.randn_like(out)

    def result() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return Workload(result, result)


def attend(heads: Tensor, bias: Tensor) -> Tensor:
    return toeplitz_attention(heads, ToeplitzBias(bias, None), DROPOUT, None)


class Logits:
    """A chunk of logits [K,n,V], and what the kernels of the output layer read beside it."""

    def __init__(self, sizes: Sizes, device: torch.device, depths: int) -> None:
        torch.manual_seed(0)
        n, V, S = sizes.chunk, sizes.vocabulary, sizes.samples
        self.logits = torch.randn(depths, n, V, device=device, dtype=sizes.dtype)
        self.gamma = torch.full((n, depths), 1 / depths, device=device)
        self.never_sampled_mask = torch.zeros(V, dtype=torch.bool, device=device)
        self.never_sampled_mask[:5] = True
        self.blocks = torch.randint(V // 64, (n, S), device=device)
        self.points = torch.rand(n, S, dtype=torch.float64, device=device)
        self.targets = torch.randint(5, V, (n,), device=device)
        self.log_sum = self.logits.float().logsumexp(-1)
        self.mixture = (self.logits, self.gamma, self.never_sampled_mask)


def summary(sizes: Sizes, device: torch.device) -> Workload:
    from amos_fairseq.functional.cuda.logits import summarize_logits

    mixture = Logits(sizes, device, sizes.depths).mixture
    return Workload(lambda: summarize_logits(*mixture), lambda: summarize_logits(*mixture))


def block_summary(sizes: Sizes, device: torch.device) -> Workload:
    """As TEAMS, which draws five tokens without replacement from one distribution: one block of each position."""
    from amos_fairseq.functional.cuda.logits import summarize_blocks

    of = Logits(sizes, device, depths=1)
    arguments = (*of.mixture, of.targets[:, None].repeat(1, 2), of.blocks[:, :1].contiguous())
    return Workload(lambda: summarize_blocks(*arguments), lambda: summarize_blocks(*arguments))


def pick(sizes: Sizes, device: torch.device) -> Workload:
    from amos_fairseq.functional.cuda.logits import pick_rows

    of = Logits(sizes, device, sizes.depths)
    arguments = (*of.mixture, of.targets[:, None][:, :0].contiguous(), of.blocks, of.points)
    return Workload(lambda: pick_rows(*arguments), lambda: pick_rows(*arguments))


def gradient(sizes: Sizes, device: torch.device) -> Workload:
    from amos_fairseq.functional.cuda.logits import gradient_of_logits

    of = Logits(sizes, device, sizes.depths)
    arguments = (of.log_sum, of.targets, torch.ones_like(of.log_sum))

    def result() -> tuple[Tensor, ...]:
        logits = of.logits.clone()
        return gradient_of_logits(logits, *arguments), logits

    # In place: a timed call takes the result of the one before it as logits, which is finite again.
    overwritten = of.logits.clone()
    return Workload(lambda: gradient_of_logits(overwritten, *arguments), result)


# By the start of a kernel's name: attention_backward may be one kernel or several. The most expensive of a step come first.
WORKLOADS = {
    build.__name__: build for build in (attention_backward, attention_forward, gradient, summary, pick, block_summary)
}


def kernels() -> list[str]:
    """Return the names of all kernels with launch constants, in the order of the sweep."""
    from amos_fairseq.functional.cuda import launches

    known = [name for start in WORKLOADS for name in launches.KERNELS if name.startswith(start)]
    if unknown := set(launches.KERNELS) - set(known):
        raise UserError(f"sweep.py has no workload for {', '.join(sorted(unknown))}")
    return known


def build(kernel: str, sizes: Sizes, device: torch.device) -> Workload:
    return next(WORKLOADS[start] for start in WORKLOADS if kernel.startswith(start))(sizes, device)


class Asked(Exception):
    """A kernel asks for its launch constants."""

    def __init__(self, width: int, launch: Launch) -> None:
        self.width, self.launch = width, launch


@contextlib.contextmanager
def launched_by(choose: Callable[[str, int, Launch], Launch]) -> Iterator[None]:
    """Replace the launch constants of every kernel by ``choose(kernel, width, own)``."""
    from amos_fairseq.functional.cuda import launches

    original = launches.launch_of

    def launch_of(kernel: str, width: int, *args: Any, **kwargs: Any) -> Launch:
        return dict(choose(kernel, width, original(kernel, width, *args, **kwargs)))

    with mock.patch.object(launches, "launch_of", launch_of):
        yield


def launched_with(kernel: str, launch: Launch) -> contextlib.AbstractContextManager[None]:
    return launched_by(lambda name, width, own: launch if name == kernel else own)


def width_and_default(kernel: str, sizes: Sizes, device: torch.device) -> tuple[int, Launch]:
    """Return what the kernel asks for, without compiling it.

    Raises:
        UserError: it takes its launch constants from elsewhere, so a sweep would change nothing.
    """

    def stop(name: str, width: int, own: Launch) -> Launch:
        if name == kernel:
            raise Asked(width, own)
        return own

    try:
        with launched_by(stop):
            build(kernel, sizes, device).result()
    except Asked as asked:
        return asked.width, asked.launch
    raise UserError(f"the kernel {kernel} does not call launches.launch_of")


@dataclass(frozen=True)
class Plan:
    """The candidates of a kernel; the default is not among them."""

    kernel: str
    width: int
    default: Launch
    candidates: list[Launch]


def launches_to_try(kernel: str, width: int) -> Iterator[Launch]:
    """Yield the default and others, some of which may not fit into a GPU's shared memory.

    Eight warps only for products of 128 rows: of fewer, both groups of four would compute the same.
    """
    from amos_fairseq.functional.cuda import launches

    default = launches.default_launch(kernel, width)
    yield default
    if kernel in launches.ATTENTION:
        # The rows of the products are queries, except in the kernel of the keys.
        rows, others = ("BLOCK_N", "BLOCK_M") if kernel == "attention_backward_key" else ("BLOCK_M", "BLOCK_N")
        sizes = [(64, 4), (128, 4), (128, 8)]
        if "BLOCK" in default:
            tiles = [{"BLOCK": size, "num_warps": warps} for size, warps in sizes]
        else:
            tiles = [{rows: n, "num_warps": warps, others: m} for n, warps in sizes for m in (32, 64, 128)]
        choices = ({**tile, "num_stages": stages} for tile in tiles for stages in (1, 2, 3))
    elif kernel == "gradient":
        choices = (
            {"TILE": tile, "ROWS": rows, "num_warps": warps}
            for tile, rows, warps in itertools.product((4, 8, 16), (128, 256, 512, 1024), (2, 4, 8))
        )
    else:
        choices = ({"num_warps": warps} for warps in (1, 2, 4, 8))
    yield from (default | choice for choice in choices)


def make_plan(kernel: str, sizes: Sizes, device: torch.device) -> Plan:
    width, default = width_and_default(kernel, small_version(sizes), device)
    candidates = [launch for launch in launches_to_try(kernel, width) if launch != default]
    return Plan(kernel, width, default, candidates if device.type == "cuda" else candidates[:1])


def small_version(sizes: Sizes) -> Sizes:
    """Fewer programs of the same code: Triton compiles for lengths that are multiples of 16, or are not."""
    return replace(sizes, sequences=1, chunk=min(16, sizes.chunk))


def compile_part(sizes: Sizes, device: torch.device, part: int, parts: int, until: float) -> None:
    """Compile every ``parts``-th candidate, those of all kernels in turns, without running any; print a line for each."""
    from triton.runtime import JITFunction

    own_run = JITFunction.run

    def only_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own_run(self, *args, **{**kwargs, "warmup": True})

    with mock.patch.object(JITFunction, "run", only_compile):
        plans = []
        for kernel in kernels():
            with contextlib.suppress(Exception):  # it fails again, and is recorded, in the sweep
                plans.append(make_plan(kernel, sizes, device))
        turns = itertools.zip_longest(*([(plan.kernel, launch) for launch in plan.candidates] for plan in plans))
        pairs = [pair for turn in turns for pair in turn if pair is not None]
        for kernel, launch in pairs[part::parts]:
            if time.time() > until:
                return
            try:
                with launched_with(kernel, launch):
                    build(kernel, small_version(sizes), device).result()
                print(kernel, flush=True)
            except Exception as error:  # it fails again, and is counted, when it is timed
                print(f"{kernel} {launch}: {first_line(error)}", file=sys.stderr)


class Records:
    """What was measured, a line of JSON each, in a file that survives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        self.all.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def find(self, kernel: str, launch: Launch | None, is_final: bool) -> dict[str, Any] | None:
        wanted = {"kernel": kernel, "launch": launch, "final": is_final}
        return next((record for record in self.all if wanted.items() <= record.items()), None)


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest relative difference of the tensors; of integers the share that differs. Not finite is infinite."""
    largest = 0.0
    for one, other in zip(got, expected, strict=True):
        if one.is_floating_point():
            # Blocks without a row have a maximum of -inf.
            both = torch.isneginf(one) & torch.isneginf(other)
            one, other = (tensor.double().masked_fill(both, 0.0) for tensor in (one, other))
            value = ((one - other).norm() / other.norm().clamp(min=1e-30)).nan_to_num(nan=float("inf"))
        else:
            value = (one != other).double().mean()
        largest = max(largest, value.item())
    return largest


@dataclass
class Timing:
    """Runs candidates and records them."""

    device: torch.device
    records: Records

    def measure(
        self, kernel: str, launch: Launch, workload: Workload, expected: tuple[Tensor, ...], budget: float, final: bool
    ) -> None:
        record: dict[str, Any] = {"kernel": kernel, "launch": launch, "final": final}
        try:
            with launched_with(kernel, launch):
                far = difference(workload.result(), expected)
                if far <= TOLERANCE:
                    record |= {"status": "ok", "ms": self.seconds(workload.call, budget) * 1e3}
                else:
                    record |= {"status": "other values", "difference": far if far < float("inf") else None}
            self.records.add(**record)
        except Exception as error:
            self.fail(record, error)

    def expected(self, kernel: str, launch: Launch, workload: Callable[[], Workload]) -> Any:
        """Return the workload and its result with the default launch; None if that fails, which is recorded."""
        try:
            with launched_with(kernel, launch):
                built = workload()
                return built, tuple(tensor.clone() for tensor in built.result())
        except Exception as error:
            self.fail({"kernel": kernel, "launch": None, "final": False}, error)
            return None

    def fail(self, record: dict[str, Any], error: Exception) -> None:
        name = type(error).__name__
        self.records.add(
            **record, status="does not fit" if name == "OutOfResources" else f"FAILED: {first_line(error)}"
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # raises where an illegal access has ended CUDA in this process

    def seconds(self, call: Callable[[], object], budget: float) -> float:
        """Return the median of calls without a pause for ``budget`` seconds, one call on a CPU."""
        timer = benchmark.Timer("call()", globals={"call": call})
        if self.device.type == "cpu":
            return timer.timeit(1).median
        timer.blocked_autorange(min_run_time=budget / 2)  # until the clock has fallen to what the power permits
        return timer.blocked_autorange(min_run_time=budget / 2).median


def run_plan(plan: Plan, sizes: Sizes, timing: Timing, until: float) -> None:
    """Time the default, the candidates until the time is over, and the fastest again."""
    records, kernel = timing.records, plan.kernel
    prepared = timing.expected(kernel, plan.default, lambda: build(kernel, sizes, timing.device))
    if prepared is None:
        return
    for launch in (plan.default, *plan.candidates):
        if launch is plan.default or time.time() < until:
            timing.measure(kernel, launch, *prepared, SECONDS, final=False)
    finalists = fastest(records, kernel, final=False)[:FINALISTS]
    for launch in (plan.default, *(record["launch"] for record in finalists if record["launch"] != plan.default)):
        timing.measure(kernel, launch, *prepared, FINAL_SECONDS, final=True)


def fastest(records: Records, kernel: str, final: bool) -> list[dict[str, Any]]:
    timed = (record for record in records.all if record["kernel"] == kernel and record["final"] == final)
    return sorted((record for record in timed if record["status"] == "ok"), key=lambda record: record["ms"])


def winner(records: Records, plan: Plan) -> tuple[Launch, float] | None:
    """Return the fastest launch and how many times as fast as the default it is; None if that is noise, or nothing ran."""
    finals = fastest(records, plan.kernel, final=True)
    default = records.find(plan.kernel, plan.default, True)
    if not finals or default is None or default["status"] != "ok":
        return None
    gain = default["ms"] / finals[0]["ms"]
    return (finals[0]["launch"], gain) if gain >= LEAST_GAIN else None


def timed_part(kernel: str) -> str:
    """Return which part of a step the times of a kernel are, if it is more than the kernel."""
    return " (of the whole backward pass)" if kernel.startswith("attention_backward") else ""


def merged(table: Table, device: str, winners: dict[str, tuple[str, Launch]]) -> Table:
    """Return the table with the winners {kernel: (width, launch)} of a device; other entries stay."""
    table = deepcopy(table)
    for kernel, (width, launch) in winners.items():
        table.setdefault(device, {}).setdefault(kernel, {})[width] = launch
    return table


def print_plan(records: Records, plan: Plan) -> None:
    timed = [record for record in records.all if record["kernel"] == plan.kernel and not record["final"]]
    statuses = ("ok", "does not fit", "other values")
    counts = {status: sum(record["status"] == status for record in timed) for status in statuses}
    failed = [record for record in timed if record["status"] not in statuses]
    total = len(plan.candidates) + 1
    missing = total - len(timed) if not failed or failed[0]["launch"] is not None else total
    print(f"\n### {plan.kernel}, width {plan.width}{timed_part(plan.kernel)}\n")
    print(f"{total} launches: {counts['ok']} timed, {counts['does not fit']} do not fit, ", end="")
    print(f"{counts['other values']} with other values, {len(failed)} failed, {missing} not run\n")
    for record in failed[:3]:
        print(f"- {record['launch'] or 'the default'}: {record['status']}")
    finals, quick = fastest(records, plan.kernel, True), fastest(records, plan.kernel, False)
    default = records.find(plan.kernel, plan.default, True)
    if default is None or default["status"] != "ok":
        print("\nThe default was not timed.")
        return
    again = [record["launch"] for record in finals]
    rows = [*finals, *(record for record in quick if record["launch"] not in again)][:SHOWN]
    print("\n| launch | ms | times as fast as the default |\n|---|---:|---:|")
    for record in rows if default in rows else [*rows, default]:
        label = ", ".join(f"{name} {value}" for name, value in record["launch"].items())
        mark = " (default)" if record["launch"] == plan.default else ""
        print(f"| {label}{mark} | {record['ms']:.4f} | {default['ms'] / record['ms']:.2f} |")


def sweep(device: torch.device, out: Path, until: float) -> None:
    """Time all kernels; a kernel that fails is left out."""
    from amos_fairseq.functional.cuda import launches

    sizes = sizes_on(device)
    records = Records(out / "sweep.jsonl")
    timing = Timing(device, records)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    plans, failed = [], []
    for kernel in kernels():
        try:
            plans.append(make_plan(kernel, sizes, device))
        except Exception as error:
            timing.fail({"kernel": kernel, "launch": None, "final": False}, error)
            failed.append(kernel)
            print(f"\n### {kernel}\n\n{records.find(kernel, None, False)['status']}", flush=True)
    winners: dict[str, tuple[str, Launch]] = {}
    gains = []
    for number, plan in enumerate(plans):
        # Each kernel gets time in proportion to its candidates; what it does not use is left to the others.
        share = len(plan.candidates) / max(1, sum(len(each.candidates) for each in plans[number:]))
        run_plan(plan, sizes, timing, time.time() + share * (until - time.time()))
        if (found := winner(records, plan)) is not None:
            winners[plan.kernel] = (f"width {plan.width}", found[0])
            gains.append(f"{plan.kernel} {found[1]:.2f}{timed_part(plan.kernel)}")
        table = merged(launches.tuned_launches(), name, winners)
        (out / "tuned_launches.json").write_text(json.dumps(table, indent=2) + "\n")
        print_plan(records, plan)
        sys.stdout.flush()
        if records.find(plan.kernel, plan.default, True) is None:
            failed.append(plan.kernel)
    print(f"\nlaunch constants on {name}: ", end="")
    print(f"times as fast as those in use: {', '.join(gains)}" if gains else "none is faster than those in use")
    sys.stdout.flush()
    if failed:
        raise UserError(f"not timed: {', '.join(failed)}")


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("sweep", "compile"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of sweep.jsonl and tuned_launches.json")
    parser.add_argument("--until", type=float, default=math.inf, help="end of the sweep, in seconds since 1970")
    parser.add_argument("--part", type=int, default=0, help="of compile")
    parser.add_argument("--parts", type=int, default=1, help="of compile")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if find_spec("triton") is None:
        print("launch constants: not run, Triton is not installed")
        return 0
    if arguments.what == "compile":
        compile_part(Sizes(), device, arguments.part, arguments.parts, arguments.until)
    else:
        sweep(device, arguments.out, arguments.until)
    return 0


if __name__ == "__main__":
    sys.exit(main())
