"""The scripts of examples/benchmark from end to end on a CPU, at tiny size: some ten minutes of a core."""

import json
import re
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_runs import ROOT, run_script

from amos_fairseq.checkpoints.read import read_state

ONE_STEP = ("--steps", "1", "--warmup", "0", "--vocabulary-size", "200", "--threads", "1")


def test_both_objectives_in_both_precisions(tmp_path: Path) -> None:
    result = run_script("examples/benchmark/cpu.sh", tmp_path, tmp_path / "out", *ONE_STEP, SIZE="tiny", SEQUENCES="2")
    assert result.returncode == 0, result.stderr[-3000:]
    reports = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert reports.keys() == {
        f"{name}_tiny_{precision}" for name in ("electra", "amos") for precision in ("float32", "bf16")
    }
    assert {name.partition("_tiny_")[2] == report["precision"] for name, report in reports.items()} == {True}


def test_speed_on_busy_cores(tmp_path: Path) -> None:
    result = run_script("examples/benchmark/busy.sh", tmp_path, "mlm_tiny", *ONE_STEP, SEQUENCES="2")
    assert result.returncode == 0, result.stderr[-3000:]
    # The memory is that of a process which asks another to fork, so it is not compared.
    rows = re.findall(r"^\| (\w+) \| [\d,]+ \| .* \| \d+ MiB \|$", result.stdout, re.MULTILINE)
    assert rows == [f"{settings}_{load}" for load in ("alone", "busy") for settings in ("stock", "passive", "ours")]


def test_fifteen_minutes_on_a_cpu(tmp_path: Path, binarized_corpus: Path) -> None:
    """Every part of the rehearsal ends well, and what it wrote can be read."""
    carry = tmp_path / "carry"
    carry.mkdir()
    with tarfile.open(carry / "data.tar.xz", "w:xz") as archive:
        archive.add(binarized_corpus, "data")
    script = "examples/benchmark/gpu/fifteen_minutes.sh"
    result = run_script(script, tmp_path, carry, "cpu", PYTHON="python", WORK=str(tmp_path / "work"), LIMIT="1100")
    out = tmp_path / "out"
    report = (out / "report.md").read_text()
    assert result.returncode == 0, report
    parts = re.findall(r"^## (\w+): status (\d+)", report, re.MULTILINE)
    objectives = ("mlm", "electra", "amos")
    names = ["versions", "updates", "train", "resume", "graphs", "speed", "curves"]
    names += [f"{part}_{objective}" for part in ("learn", "weights") for objective in objectives]
    assert sorted(parts) == sorted((name, "0") for name in names)
    for recipe in ("amos_tiny", "electra_tiny", "electric_tiny", "mlm_tiny", "teams_tiny"):
        assert f"| {recipe} | fast | " in report
    assert "the same bits" in report
    assert [json.loads(line)["recipe"] for line in (out / "speed.jsonl").open()] == ["amos_tiny", "electra_tiny"]
    files = {"report.md", "all.log", "speed.jsonl", "runs.tar.gz", *(f"{objective}.pt" for objective in objectives)}
    assert {path.name for path in out.iterdir()} == files
    assert_weights_are_those_of_the_run(out / "electra.pt", tmp_path / "work/run_electra/checkpoint_last.pt")
    again = run_script(script, tmp_path, carry, "cpu", PYTHON="python", PARTS="none")
    assert (again.returncode, "has a report: give another OUT" in again.stderr) == (1, True)


def assert_weights_are_those_of_the_run(brought: Path, run: Path) -> None:
    """Rounded to bfloat16, without moments."""
    few, all_of_them = read_state(brought), read_state(run)
    assert few["last_optimizer_state"] is None
    assert few["model"].keys() == all_of_them["model"].keys()
    for name, tensor in few["model"].items():
        assert torch.equal(tensor, all_of_them["model"][name].to(tensor.dtype))
    assert {tensor.dtype for tensor in few["model"].values()} == {torch.bfloat16}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_sweep_in_the_interpreter(tmp_path: Path) -> None:
    """Every kernel with its default and one candidate, which gives the same values."""
    folders = {"PYTHONPATH": "", "TRITON_INTERPRET": "1"}
    script = tmp_path / "sweep.sh"
    script.write_text(
        'set -e\nsource "$1/examples/environment.sh"\nprepare_environment\n'
        'python "$1/examples/benchmark/gpu/sweep.py" sweep --device cpu --out "$2"\n'
    )
    result = run_script(str(script), tmp_path, ROOT, tmp_path, **folders)
    assert result.returncode == 0, result.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "sweep.jsonl").open()]
    assert {record["status"] for record in records} == {"ok"}
    assert len({record["kernel"] for record in records}) == 7
    assert (tmp_path / "tuned_launches.json").exists()
