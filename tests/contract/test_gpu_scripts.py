"""examples/benchmark/gpu: every script from end to end on a CPU, at tiny size, offline, in an active environment."""

import gzip
import inspect
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from benchmark.gpu import correct, decide_kernels, kernels, profile_step, sanitizer, sweep, training_curves
from check_environment import OF_FAIRSEQ, name_of, requirements
from failures import refusal
from fairseq.data import Dictionary
from shell_scripts import run_script
from synthetic_glue import write_glue, write_pretraining_data, write_rows
from tiny_runs import ROOT, environment, run_process
from torch import Tensor
from waiting import has_ended, wait_until

from amos_fairseq.errors import UserError
from amos_fairseq.functional.attention import has_varlen
from amos_fairseq.measure.fake_cuda import fake_cuda

MOST_FILES = 8  # that a script may leave in OUT
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def files_of(folder: Path) -> set[str]:
    """What a script has left; nothing may lie deeper."""
    paths = list((folder / "out").rglob("*"))
    assert all(path.parent == folder / "out" for path in paths)
    assert len(paths) <= MOST_FILES
    return {path.name for path in paths}


def results(page: str) -> dict[str, str]:
    """Step -> result, of the table at the top."""
    rows = [line.strip("|").split("|") for line in page.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return {name.strip(): result.strip() for name, _, result in rows[1:]}


def rehearse(folder: Path, name: str, *arguments: str | Path, **variables: str) -> str:
    """Run a script on the CPU; assert that all steps pass, that it ends with what was decided, and return its page."""
    result = run_script(f"examples/benchmark/gpu/{name}.sh", folder, *arguments, "--device", "cpu", **variables)
    page = (folder / "out" / f"{name}.md").read_text(encoding="utf-8")
    log = (folder / "out" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    assert result.returncode == 0, page[:2000] + log[-3000:]
    assert set(results(page).values()) == {"passed"}
    assert decisions(page)
    terminal = result.stderr.splitlines()[-10:]
    assert terminal[terminal.index("Decided:") + 1 :] == [f"  {line}" for line in decisions(page)]
    return page


def decisions(page: str) -> list[str]:
    """The last lines of the page."""
    return [line.removeprefix("- ") for line in page.split("\nDecided:\n\n")[-1].splitlines()]


@pytest.mark.slow
def test_1_correct(tmp_path: Path) -> None:
    page = rehearse(tmp_path, "1_correct")
    assert files_of(tmp_path) == {"1_correct.md", "1_correct.log"}
    for recipe in ("amos_tiny", "electra_tiny", "electric_tiny", "mlm_tiny", "teams_tiny"):
        assert f"| {recipe} | fast | " in page
    assert page.count(" skipped, ") == 1  # every test, for want of a GPU
    decided = decisions(page)
    resumed = (
        "amos_tiny, bf16, model.deterministic=true: after 8 updates, resumed after 4, "
        "325 tensors of model and optimizer have the "
    )
    assert f"{resumed}same bits" in decided
    assert "2 runs of attention with kernels=fast give the same bits" in decided
    assert decided[-1] == "the defaults are right on this machine: not known: rehearsed"


@pytest.mark.slow
def test_2_triton(tmp_path: Path) -> None:
    """A stand-in for compute-sanitizer starts what it is given, as that does, in Triton's interpreter."""
    sanitizer = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir(parents=True)
    sanitizer.write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\n'
        'TRITON_INTERPRET=1 "$@" && echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    sanitizer.chmod(0o755)
    page = rehearse(tmp_path, "2_triton", CUDA_HOME=str(tmp_path / "cuda"))
    assert files_of(tmp_path) == {"2_triton.md", "2_triton.log"}
    assert page.count(" skipped, ") == 1  # every test, for want of a GPU
    decided = decisions(page)
    assert decided[-1] == "the Triton kernels are right on this machine: not known: rehearsed"
    if find_spec("triton") is not None:
        assert "2 runs of attention with kernels=triton give the same bits" in decided
        assert "compute-sanitizer: memcheck 0 errors, racecheck 0 errors" in decided
        assert "6 kernels ran" in (tmp_path / "out" / "2_triton.log").read_text()


def test_a_kernel_with_other_bits_is_seen() -> None:
    """The largest difference of five results from the first, by hand; nan is a difference."""
    results = iter([1.0, 1.0, 1.5, 0.75, 1.0])
    found = correct.differences_of_runs(lambda: (torch.tensor([2.0, -3.0]), torch.tensor([next(results)])), 5)
    assert found == [(3.0, 0.0), (1.0, 0.5)]
    with_nan = iter([1.0, float("nan")])
    assert correct.differences_of_runs(lambda: (torch.tensor([next(with_nan)]),), 2)[0][1] == float("inf")


def test_a_sanitizer_that_does_not_end_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in starts another process, which holds the pipe open."""
    program, child = tmp_path / "bin" / "compute-sanitizer", tmp_path / "child"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {child}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert sanitizer.find_sanitizer() == str(program)
    monkeypatch.setitem(sanitizer.LIMITS, "memcheck", 2)
    began = time.monotonic()
    assert sanitizer.check(str(program), "memcheck", "cpu") == "not finished after 2 s"
    assert time.monotonic() - began < 60
    wait_until(lambda: has_ended(int(child.read_text())))


@pytest.mark.parametrize(
    ("summary", "results", "line"),
    [
        ("ERROR SUMMARY: 2 errors", "FAILED: 2 errors, see the log", "found errors in the Triton kernels: see above"),
        ("no device", "FAILED: ended with status 1, see the log", "could not run the Triton kernels: see above"),
    ],
)
def test_a_sanitizer_that_fails_is_one_line(tmp_path: Path, summary: str, results: str, line: str) -> None:
    (tmp_path / "compute-sanitizer").write_text(f"#!/bin/sh\necho '{summary}'\nexit 1\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    script = [sys.executable, ROOT / "examples" / "benchmark" / "gpu" / "sanitizer.py", "--device", "cpu"]
    done = run_process(script, tmp_path, environment({"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    assert refusal(done) == f"compute-sanitizer {line}"
    assert done.stdout == f"Decided: compute-sanitizer: memcheck {results}, racecheck {results}\n"


@pytest.mark.slow
def test_3_baseline(tmp_path: Path) -> None:
    page = rehearse(tmp_path, "3_baseline")
    contests = {"electra_2.json", "amos_2.json", "amos_4.json"}
    assert files_of(tmp_path) == {"3_baseline.md", "3_baseline.log", "trace.json.gz", *contests}
    contestants = json.loads((tmp_path / "out" / "electra_2.json").read_text())["contestants"]
    assert {contestant["name"] for contestant in contestants} == {"ours", "hf"}
    assert "| attention | " in page
    assert "Operators of a step: " in page
    assert "failed" not in page.split("ms, predicted (H200; a CPU is not known)")[1].split("Operators")[0]
    trace = json.loads(gzip.decompress((tmp_path / "out" / "trace.json.gz").read_bytes()))
    assert any("addmm" in event["name"] for event in trace["traceEvents"])
    decided = decisions(page)
    assert decided[0].startswith("amos_tiny, 2 sequences, kernels=fast: ours ")
    assert any("sequences, kernels=fast: ours " in line and "; hf " in line for line in decided)
    assert any(line.startswith("the host launches fast enough: ") for line in decided)


def test_gaps_between_kernels() -> None:
    """By hand: 0 to 4, 3 to 5 and 1 to 2 overlap; idle from 5 to 7 and from 8 to 8.5, of 10 microseconds."""
    times = [(3, 5, "b"), (0, 4, "a"), (1, 2, "c"), (7, 8, "d"), (8.5, 10, "e")]
    events = [SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), name=n) for start, end, n in times]
    assert profile_step.gaps_of(events) == (7.5, 10, [(2, "d"), (0.5, "e")])


def test_a_trace_that_is_too_large_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = SimpleNamespace(export_chrome_trace=lambda name: Path(name).write_text("{}"))
    assert profile_step.save_trace(profiled, tmp_path / "trace.json.gz") == "trace.json.gz"
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == b"{}"
    monkeypatch.setattr(profile_step, "TRACE_BYTES", 1)
    assert profile_step.save_trace(profiled, tmp_path / "other.json.gz").startswith("the trace is not saved, it has ")
    assert not (tmp_path / "other.json.gz").exists()


def test_a_prediction_that_does_not_end_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_step, "PREDICTION_SECONDS", 0.1)
    process = profile_step.subprocess.Popen(["sleep", "60"], stdout=profile_step.subprocess.PIPE, text=True)
    assert profile_step.predicted_parts(process) is None
    assert process.returncode is not None


@pytest.mark.parametrize("overrides", [[], ["model.layers=2", "dataset.batch_size=4"]])
def test_the_prediction_gets_the_settings(overrides: list[str]) -> None:
    """argparse refuses --set without a value."""
    settings = profile_step.BenchSettings("amos_tiny", overrides, precision="bf16")
    with mock.patch.object(profile_step.subprocess, "Popen") as start:
        profile_step.start_prediction(settings, "h200")
    command = start.call_args.args[0]
    assert command[command.index("--set") + 1 :] == overrides if overrides else "--set" not in command


@pytest.mark.parametrize(
    ("name", "key", "label"),
    [
        ("NVIDIA H200", "h200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "a100", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "h100", "H100"),
        ("NVIDIA GH200 480GB", "h200", "H200"),
        ("NVIDIA RTX A1000", "h200", "H200; NVIDIA RTX A1000 is not known"),
        ("NVIDIA L4", "h200", "H200; NVIDIA L4 is not known"),
    ],
)
def test_the_prediction_is_that_of_the_gpu(name: str, key: str, label: str) -> None:
    names = {"h200": "H200", "h100": "H100", "a100": "A100 80GB"}
    known = {device: SimpleNamespace(name=label) for device, label in names.items()}
    with mock.patch.object(profile_step, "DEVICES", known):
        assert profile_step.paper_device(name) == (key, label)


@pytest.mark.slow
@needs_triton
def test_4_kernels(tmp_path: Path) -> None:
    (tmp_path / "baseline").mkdir()
    write_contest(tmp_path / "baseline" / "amos_2.json", 1e-3, 2e-3)  # tokens/s: Triton's step is faster by far
    page = rehearse(tmp_path, "4_kernels", BASELINE=str(tmp_path / "baseline"))
    assert files_of(tmp_path) == {
        *("4_kernels.md", "4_kernels.log", "sweep.jsonl"),
        *("tuned_launches.json", "amos_2_triton.json"),
    }
    records = sweep.Records(tmp_path / "out" / "sweep.jsonl").all
    for kernel in sweep.kernels():
        assert f"### {kernel}, width " in page
        timed = [record for record in records if record["kernel"] == kernel and not record["final"]]
        assert [record["status"] for record in timed] == ["ok", "ok"]
    assert "2 launches: 2 timed, 0 do not fit, 0 with other values, 0 failed, 0 not run" in page
    tuned = json.loads((tmp_path / "out" / "tuned_launches.json").read_text())
    gains = re.search(r"launch constants on cpu: (.*)", page).group(1)
    assert {kernel for kernel in sweep.kernels() if f" {kernel} " in gains} == set(tuned.get("cpu", {}))
    assert "model.kernels=triton should be the default: yes (a step " in page
    assert "model.compile=true should be the default: not measured" in page  # the rehearsal does not compile
    assert "fastest chunk " in page
    assert "| ours on a CPU | 0.1 | yes | " in page
    assert page.count("| in chunks | ") == 5
    assert page.count("| definition | ") == 2


def write_contest(file: Path, as_written: float, compiled: float) -> None:
    """Two rows of ours and a peer, which does not count, in the format of ``amos bench``."""
    speeds = {"ours": as_written, "ours, compiled": compiled, "hf": 99.0}
    rows = [{"name": n, "is_ours": n != "hf", "tokens_per_second": {"median": speed}} for n, speed in speeds.items()]
    file.write_text(json.dumps({"contestants": rows}))


def test_defaults_of_measured_steps(tmp_path: Path) -> None:
    """By hand, in tokens/s: the gain of compile is that of the kernels that win."""
    write_contest(tmp_path / "fast.json", 10.0, 11.0)
    write_contest(tmp_path / "triton.json", 13.0, 13.2)
    fast, triton, nothing = (decide_kernels.own_rows(tmp_path / f"{name}.json") for name in ("fast", "triton", "none"))
    kernels_line, compile_line = (
        "model.kernels=triton should be the default: ",
        "model.compile=true should be the default: ",
    )
    assert decide_kernels.decisions(fast, triton) == [
        f"{kernels_line}yes (a step 1.20 times as fast as with fast)",
        f"{compile_line}no (a step with kernels=triton 1.02 times as fast as written)",
    ]
    slower = {False: 9.0, True: 9.9}
    assert decide_kernels.decisions(fast, slower) == [
        f"{kernels_line}no (a step 0.90 times as fast as with fast)",
        f"{compile_line}yes (a step with kernels=fast 1.10 times as fast as written)",
    ]
    assert decide_kernels.decisions(nothing, triton) == [f"{kernels_line}not measured", f"{compile_line}not measured"]


def test_the_table_of_attention_decides_about_cudnn(capsys: pytest.CaptureFixture[str]) -> None:
    """Only rows without a bias and dropout count; times by hand: forward and backward pass together."""
    rows = [("flash, no bias", 0.0), ("flash, no bias", 0.1), ("cuDNN, no bias", 0.0), ("efficient", 0.0)]
    variants = [kernels.Variant(name, torch.empty, (), dropout) for name, dropout in rows]
    times = [(1e-3, 2e-3), (5e-3, 5e-3), (1e-3, 1.5e-3), (9e-3, 9e-3)]
    with (
        mock.patch.object(kernels, "attention_variants", return_value=variants),
        mock.patch.object(kernels, "forward_and_backward", side_effect=times),
    ):
        kernels.print_attention(kernels.Sizes(), torch.device("cpu"))
    decided = "Decided: attention without a bias and dropout, forward and backward: flash 3.000 ms, cuDNN 2.500 ms"
    assert capsys.readouterr().out.splitlines()[-1] == decided
    assert kernels.fastest_chunk("in chunks", {32: 3.0, 64: 2.0, 128: 2.5}, torch.device("cuda")) == (
        "output layer in chunks: fastest chunk 64 MiB, 2.00 ms (now 128 MiB)"
    )


def test_backends_of_attention_take_their_arguments() -> None:
    """Both directions of those that need no compiler, on a fake device."""
    done = []
    with fake_cuda():
        for variant in kernels.attention_variants(kernels.Sizes(2, 256, 2), torch.device("cuda")):
            if variant.name == "compiled definition":
                break
            out = variant.call()
            gradients = torch.autograd.grad(out, variant.leaves, torch.empty_like(out))
            assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in variant.leaves]
            done.append(variant.name)
    packed = ["varlen, no bias", "varlen, window"] if has_varlen() else []
    assert list(dict.fromkeys(done)) == [
        *("flash, no bias", "cuDNN, no bias"),
        *packed,
        *("efficient, mask of the window", "efficient"),
    ]


@needs_triton
def test_only_a_launch_with_the_right_values_can_win(tmp_path: Path) -> None:
    """One wrong launch and one that does not fit, both fast; a right one is twice as fast as the default."""
    milliseconds = {1: 4.0, 2: 2.0, 3: 1.0, 4: 1.0}

    class OutOfResources(Exception):
        pass

    class Stub(sweep.Timing):
        def seconds(self, call: Callable[[], object], budget: float) -> float:
            return milliseconds[launch_now()] / 1e3

    def launch_now() -> int:
        from amos_fairseq.functional.cuda import launches

        return launches.launch_of("summary", 0, torch.device("cpu"))["num_warps"]

    def result() -> tuple[Tensor, ...]:
        if launch_now() == 4:
            raise OutOfResources("shared memory")
        return (torch.full((3,), 2.0 if launch_now() == 3 else 1.0),)

    default, *others = ({"num_warps": number} for number in (1, 2, 3, 4))
    plan = sweep.Plan("summary", 0, default, others)
    records = sweep.Records(tmp_path / "records.jsonl")
    timing = Stub(torch.device("cpu"), records)
    with mock.patch.object(sweep, "build", return_value=sweep.Workload(lambda: None, result)):
        sweep.run_plan(plan, sweep.TINY, timing, until=float("inf"))
    statuses = [record["status"] for record in records.all if not record["final"]]
    assert statuses == ["ok", "ok", "other values", "does not fit"]
    assert sweep.winner(records, plan) == ({"num_warps": 2}, 2.0)
    again = sweep.Records(records.path)  # a process that starts again measures nothing twice
    assert again.all == records.all
    # Without time only the default runs.
    late = sweep.Records(tmp_path / "late.jsonl")
    with mock.patch.object(sweep, "build", return_value=sweep.Workload(lambda: None, result)):
        sweep.run_plan(plan, sweep.TINY, Stub(torch.device("cpu"), late), until=0.0)
    assert [record["launch"] for record in late.all] == [default, default]
    assert sweep.winner(late, plan) is None


def test_a_lost_context_ends_the_process(tmp_path: Path) -> None:
    """The candidate is recorded first, so that it does not run again; here CUDA fails because there is none."""
    records = sweep.Records(tmp_path / "records.jsonl")
    record = {"kernel": "pick", "launch": {"num_warps": 8}, "final": False}
    with (
        mock.patch.object(os, "_exit", side_effect=SystemExit) as end,
        mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("illegal memory access")),
        pytest.raises(SystemExit),
    ):
        sweep.Timing(torch.device("cuda"), records).fail(record, RuntimeError("illegal memory access"))
    end.assert_called_once_with(75)
    found = sweep.Records(records.path).find("pick", {"num_warps": 8}, False)
    assert found["status"] == "FAILED: RuntimeError: illegal memory access"
    with mock.patch.object(torch.cuda, "synchronize"):  # another error leaves the context as it is
        sweep.Timing(torch.device("cuda"), records).fail(record, ValueError("no"))


@pytest.mark.parametrize(("lost", "starts", "status"), [(2, 3, 0), (100, 20, 75)])
def test_a_sweep_starts_again_a_bounded_number_of_times(tmp_path: Path, lost: int, starts: int, status: int) -> None:
    """The loop of the script with a stand-in for Python, which loses CUDA ``lost`` times."""
    loop = re.search(
        r"^sweep\(\) \{.*?^\}", (ROOT / "examples/benchmark/gpu/4_kernels.sh").read_text(), re.S | re.M
    ).group()
    script = tmp_path / "loop.sh"
    script.write_text(
        f"set -euo pipefail\nGPU_SCRIPTS=. DEVICE=cpu OUT=. n=0\n{loop}\n"
        f"python() {{ n=$((n + 1)); echo start; [ $n -gt {lost} ] || return 75; }}\nsweep 0\n"
    )
    finished = run_script(str(script), tmp_path)
    assert finished.stdout.split() == ["start"] * starts
    assert finished.returncode == status


@needs_triton
def test_a_sweep_keeps_what_was_measured_before_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of one kernel fails, and the timing of attention at the end; then a second process continues."""
    from amos_fairseq.functional.cuda import launches

    measured = []

    class Stub(sweep.Timing):
        def seconds(self, call: Callable[[], object], budget: float) -> float:
            measured.append(launches.launch_of("summary", 0, torch.device("cpu"))["num_warps"])
            return 1.0 / measured[-1]

    def make_plan(kernel: str, *_: object) -> sweep.Plan:
        if kernel == "pick":
            raise ValueError("no pick")
        return sweep.Plan(kernel, 0, {"num_warps": 1}, [{"num_warps": 2}])

    monkeypatch.setattr(sweep, "kernels", lambda: ["pick", "summary"])
    monkeypatch.setattr(sweep, "make_plan", make_plan)
    monkeypatch.setattr(sweep, "Timing", Stub)
    monkeypatch.setattr(sweep, "build", lambda *_: sweep.Workload(lambda: None, lambda: (torch.ones(3),)))
    monkeypatch.setattr(sweep, "time_attention", mock.Mock(side_effect=RuntimeError("no attention")))
    with pytest.raises(UserError, match="not timed: pick, attention as a whole"):
        sweep.sweep(torch.device("cpu"), tmp_path, float("inf"))
    assert json.loads((tmp_path / "tuned_launches.json").read_text()) == {
        "cpu": {"summary": {"width 0": {"num_warps": 2}}}
    }
    out = capsys.readouterr().out
    assert "### pick\n\nFAILED: ValueError: no pick" in out
    assert "| num_warps 2 | 500.0000 | 2.00 |" in out
    assert "Decided: launch constants on cpu: times as fast as those in use: summary 2.00\n" in out
    assert "It has failed: RuntimeError: no attention" in out
    assert len(sweep.Records(tmp_path / "sweep.jsonl").all) == 5
    assert measured == [1, 2, 1, 2]
    monkeypatch.setattr(sweep, "time_attention", mock.Mock())
    with pytest.raises(UserError, match=r"not timed: pick$"):
        sweep.sweep(torch.device("cpu"), tmp_path, float("inf"))
    assert measured == [1, 2, 1, 2]
    assert "### summary" not in capsys.readouterr().out


def test_a_table_keeps_other_devices_and_earlier_winners() -> None:
    old = {"A": {"pick": {"width 4": {"num_warps": 2}}}, "B": {"summary": {"width 0": {"num_warps": 8}}}}
    before = json.dumps(old)
    table = sweep.merged(old, "A", {"pick": ("width 8", {"num_warps": 4}), "summary": ("width 0", {"num_warps": 1})})
    assert table == {
        "A": {
            "pick": {"width 4": {"num_warps": 2}, "width 8": {"num_warps": 4}},
            "summary": {"width 0": {"num_warps": 1}},
        },
        "B": {"summary": {"width 0": {"num_warps": 8}}},
    }
    assert sweep.merged(table, "A", {"pick": ("width 8", {"num_warps": 1})})["A"]["pick"]["width 8"] == {"num_warps": 1}
    assert sweep.merged(old, "C", {}) == old
    assert json.dumps(old) == before


@needs_triton
def test_candidates_are_compiled_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One candidate does not compile; of two processes each takes every second one."""
    from triton.runtime import JITFunction

    assert "warmup" in inspect.signature(JITFunction.run).parameters
    calls = []

    class Stub:
        def run(self, launch: int, *, warmup: bool) -> None:
            calls.append((launch, warmup))
            if launch == 4:
                raise ValueError("does not compile")

    from amos_fairseq.functional.cuda import launches

    def result() -> tuple[Tensor, ...]:
        Stub().run(launches.launch_of("pick", 4, torch.device("cpu"))["num_warps"], warmup=False)
        return ()

    def make_plan(kernel: str, *_: object) -> sweep.Plan:
        return sweep.Plan(kernel, 4, {"num_warps": 1}, [{"num_warps": number} for number in (2, 4, 8)])

    with (
        mock.patch("triton.runtime.JITFunction", Stub),
        mock.patch.object(sweep, "kernels", return_value=["pick"]),
        mock.patch.object(sweep, "make_plan", make_plan),
        mock.patch.object(sweep, "build", return_value=sweep.Workload(lambda: None, result)),
    ):
        sweep.compile_part(sweep.TINY, torch.device("cpu"), 0, 1, float("inf"))
        assert calls == [(2, True), (4, True), (8, True)]
        assert capsys.readouterr().out.splitlines() == ["pick", "pick"]  # what the parent counts
        sweep.compile_part(sweep.TINY, torch.device("cpu"), 1, 2, float("inf"))
        assert calls[3:] == [(4, True)]
        sweep.compile_part(sweep.TINY, torch.device("cpu"), 0, 1, 0.0)
        assert len(calls) == 4
        Stub().run(2, warmup=False)
        assert calls[-1] == (2, False)


@needs_triton
def test_a_kernel_whose_launch_cannot_be_changed_is_refused() -> None:
    """The sweep would time the same launch again and again."""
    nothing = sweep.Workload(lambda: None, lambda: ())
    refused = pytest.raises(UserError, match=r"the kernel pick does not call launches\.launch_of")
    with mock.patch.object(sweep, "build", return_value=nothing), refused:
        sweep.width_and_default("pick", sweep.TINY, torch.device("cpu"))


@pytest.mark.slow
def test_5_train(tmp_path: Path) -> None:
    """The curve of a CPU first, and then everything beside it: on one machine the same bits."""
    data, glue, first = tmp_path / "text", tmp_path / "glue", {"OUT": str(tmp_path / "first")}
    small = {"CURVE_UPDATES": "5", "CURVE_SEQUENCES": "2"}
    write_pretraining_data(data)
    write_glue(glue, data, "SST-2", ["0", "1"], {"train": 32, "valid": 16}, pair=False)
    curve = run_script(
        "examples/benchmark/gpu/5_train.sh", tmp_path, data, "--curve", "--device", "cpu", **first, **small
    )
    assert curve.returncode == 0, curve.stderr
    curves = {"cpu_curve_mlm.jsonl", "cpu_curve_amos.jsonl"}
    assert {path.name for path in (tmp_path / "first").iterdir()} == {"5_train.md", "5_train.log", *curves}
    settings = "common.log_format=json task.precision=float32"  # of all runs, but not of the curve's header
    page = rehearse(
        tmp_path, "5_train", data, glue, TASKS="SST-2", CPU_CURVE=str(tmp_path / "first"), SETTINGS=settings
    )
    scores = {f"glue_{objective}.json" for objective in ("mlm", "electra", "amos")}
    assert files_of(tmp_path) == {"5_train.md", "5_train.log", "curves.png", *scores, *curves}
    for objective in ("mlm", "electra", "amos"):
        assert f"### {objective}\n" in page
    assert page.count('"split": "valid"') == 3
    runs = (tmp_path / "out" / "5_train.log").read_text(encoding="utf-8", errors="replace").split("---- ")
    for call in ("first_updates mlm", "first_updates amos", "pretrain electra"):
        assert re.search(r'"\w*num_updates": "', next(run for run in runs if run.startswith(call)))
    decided = "\n".join(decisions(page))
    assert "follow the curve of a CPU: yes (mlm differs by 0.000 of " in decided
    assert re.search(r"learned more than token frequencies \(\d\.\d\d nats\): mlm NO, \d\.", decided)
    assert re.search(r": mlm SST-2 \d+\.\d; electra SST-2 \d+\.\d; amos SST-2 \d+\.\d", decided)


def test_curves_are_compared_after_smoothing() -> None:
    """By hand: of 12 records three means of 10; an outlier of 5 nats moves a mean by 0.5."""
    one = [{"update": 5 * number, "mlm_loss_1": 7.0, "rtd_loss": 0.5} for number in range(12)]
    other = [dict(record) for record in one]
    other[0]["mlm_loss_1"] = 12.0
    assert training_curves.largest_differences(one, other) == {"mlm_loss_1": pytest.approx(0.5), "rtd_loss": 0.0}
    other[3]["rtd_loss"] = None
    assert training_curves.largest_differences(one, other)["rtd_loss"] == float("inf")
    with pytest.raises(UserError, match="other updates"):
        training_curves.largest_differences(one, other[1:])


def test_entropy_of_the_token_frequencies(tmp_path: Path) -> None:
    """Three tokens with shares 1/2, 1/4, 1/4: 1.5 bits; the end of a line does not count."""
    dictionary = Dictionary()
    tokens = [dictionary.add_symbol(symbol) for symbol in "abc"]
    dictionary.save(str(tmp_path / "dict.txt"))
    a, b, c = tokens
    write_rows(tmp_path, "train", [[a, b, dictionary.eos()], [a, c, dictionary.eos()]])
    assert training_curves.unigram_entropy(tmp_path) == pytest.approx(1.5 * math.log(2))


@pytest.mark.slow
def test_too_many_rows_are_refused(tmp_path: Path) -> None:
    data, glue = tmp_path / "text", tmp_path / "glue"
    write_pretraining_data(data)
    write_glue(glue, data, "SST-2", ["0", "1"], {"train": 32, "valid": 16}, pair=False)
    arguments = (data, glue, "--device", "cpu")
    result = run_script("examples/benchmark/gpu/5_train.sh", tmp_path, *arguments, MOST_ROWS="31")
    assert "SST-2 has 32 training rows, more than MOST_ROWS=31" in refusal(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("1_correct.sh", (), "PyTorch finds no CUDA device"),
        ("1_correct.sh", ("--device", "tpu"), "--device tpu is not known: give cpu or cuda"),
        ("4_kernels.sh", ("--fast",), "--fast is not a flag of 4_kernels.sh"),
        ("5_train.sh", ("--device", "cpu"), "give DATA and GLUE"),
        ("5_train.sh", ("nowhere", "--device", "cpu"), "give DATA and GLUE, or DATA and --curve"),
        ("5_train.sh", ("nowhere", "nowhere", "--device", "cpu"), "DATA=nowhere holds no dict.txt"),
        ("5_train.sh", ("nowhere", "--curve", "--device", "cpu"), "DATA=nowhere holds no dict.txt"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, name: str, arguments: tuple[str, ...], words: str) -> None:
    result = run_script(f"examples/benchmark/gpu/{name}", tmp_path, *arguments)
    assert words in refusal(result)


def test_a_step_that_fails_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.sh"
    script.write_text(
        f'set -euo pipefail\nsource "{ROOT}/examples/benchmark/gpu/common.sh"\nbegin "${{BASH_SOURCE[0]}}" --device cpu\n'
        'step "first" 60 false\nstep "slow" 1 sleep 60\nstep "second" 60 echo of the second\n'
        'step "fourth" 60 echo "Decided: four is even"\n'
        """step "fifth" 60 bash -c 'printf "Decided: %s\\n" five odd; exit 3'\n"""
        "decide_whether_right these\nDEVICE=cuda FAILED=0\ndecide_whether_right these\n"
        'decide "memcheck not finished"\ndecide_whether_right these\n'
        'LIMIT_SECONDS=0\nstep "third" 60 true\nfinish\n'
    )
    finished = run_script(str(script), tmp_path)
    assert finished.returncode == 1
    page = (tmp_path / "out" / "example.md").read_text(encoding="utf-8")
    assert results(page) == {
        "first": "FAILED (exit status 1)",
        "slow": "FAILED (stopped after 1 s)",
        "second": "passed",
        "fourth": "passed",
        "fifth": "FAILED (exit status 3)",
        "third": "not run: no time left",
    }
    assert "## second\n\nof the second" in page
    assert "## fourth\n\nDecided: four is even\n" in page
    expected = ["first: FAILED (exit status 1)", "slow: FAILED (stopped after 1 s)", "second: passed", "four is even"]
    expected += ["fifth: FAILED (exit status 3); five; odd"]  # one line
    right = "these are right on this machine: "
    expected += [f"{right}not known: the rehearsal FAILED", f"{right}yes", "memcheck not finished"]
    assert decisions(page) == [*expected, f"{right}yes, as far as it was finished", "third: not run"]


@pytest.mark.parametrize("name", ["1_correct.sh", "2_triton.sh", "3_baseline.sh", "4_kernels.sh", "5_train.sh"])
def test_help(tmp_path: Path, name: str) -> None:
    result = run_script(f"examples/benchmark/gpu/{name}", tmp_path, "--help")
    assert result.returncode == 0
    assert "--device cpu: a rehearsal" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", [*requirements(), *OF_FAIRSEQ, "pytest", "pytest-xdist"])
def test_the_page_names_what_a_machine_without_a_network_needs(line: str) -> None:
    page = (ROOT / "docs/first_hour_on_a_gpu.md").read_text(encoding="utf-8")
    names = page.split("says in one line what the machine lacks, of:")[1].split("\n\n")[1]
    assert name_of(line) in re.findall(r"[\w-]+", names)
