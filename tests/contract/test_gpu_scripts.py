"""examples/benchmark/gpu: every script from end to end on a CPU, at tiny size, offline, in an active environment."""

import json
from pathlib import Path

import pytest
from failures import refusal
from shell_scripts import run_script
from synthetic_glue import write_glue, write_pretraining_data
from tiny_runs import ROOT

MOST_FILES = 8  # that a script may leave in OUT


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
    """Run a script on the CPU; assert that all steps pass, and return its page."""
    result = run_script(f"examples/benchmark/gpu/{name}.sh", folder, *arguments, "--device", "cpu", **variables)
    page = (folder / "out" / f"{name}.md").read_text(encoding="utf-8")
    log = (folder / "out" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    assert result.returncode == 0, page[:2000] + log[-3000:]
    assert set(results(page).values()) == {"passed"}
    return page


@pytest.mark.slow
def test_1_correct(tmp_path: Path) -> None:
    page = rehearse(tmp_path, "1_correct")
    assert files_of(tmp_path) == {"1_correct.md", "1_correct.log"}
    assert "after 8 updates, resumed after 4: the same bits" in page
    for recipe in ("amos_tiny", "electra_tiny", "electric_tiny", "mlm_tiny", "teams_tiny"):
        assert f"| {recipe} | fast | " in page
        assert f"| {recipe} | triton | " in page
    assert page.count(" skipped, ") == 2  # every test, for want of a GPU


@pytest.mark.slow
def test_2_baseline(tmp_path: Path) -> None:
    page = rehearse(tmp_path, "2_baseline")
    contests = {"electra_2.json", "amos_2.json", "amos_2_triton.json", "amos_4.json"}
    assert files_of(tmp_path) == {"2_baseline.md", "2_baseline.log", *contests}
    contestants = json.loads((tmp_path / "out" / "electra_2.json").read_text())["contestants"]
    assert {contestant["name"] for contestant in contestants} == {"ours", "hf"}
    assert "| attention | " in page
    assert "Operators of a step: " in page
    assert "failed" not in page.split("ms, predicted for an H200")[1].split("Operators")[0]


@pytest.mark.slow
def test_3_kernels(tmp_path: Path) -> None:
    page = rehearse(tmp_path, "3_kernels")
    assert files_of(tmp_path) == {"3_kernels.md", "3_kernels.log"}
    assert "| ours on a CPU | 0.1 | yes | " in page
    assert page.count("| in chunks | ") == 5
    assert page.count("| definition | ") == 2


@pytest.mark.slow
def test_4_train(tmp_path: Path) -> None:
    data, glue = tmp_path / "text", tmp_path / "glue"
    write_pretraining_data(data)
    write_glue(glue, data, "MRPC", ["0", "1"], {"train": 32, "valid": 16}, pair=True)
    page = rehearse(tmp_path, "4_train", data, glue, TASKS="MRPC")
    scores = {f"glue_{objective}.json" for objective in ("mlm", "electra", "amos")}
    assert files_of(tmp_path) == {"4_train.md", "4_train.log", "curves.png", *scores}
    for objective in ("mlm", "electra", "amos"):
        assert f"### {objective}\n" in page
    assert page.count('"split": "valid"') == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("1_correct.sh", (), "PyTorch finds no CUDA device"),
        ("1_correct.sh", ("--device", "tpu"), "--device tpu is not known: give cpu or cuda"),
        ("3_kernels.sh", ("--fast",), "--fast is not a flag of 3_kernels.sh"),
        ("4_train.sh", ("--device", "cpu"), "give DATA and GLUE"),
        ("4_train.sh", ("nowhere", "nowhere", "--device", "cpu"), "DATA=nowhere holds no dict.txt"),
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
        'LIMIT_SECONDS=0\nstep "third" 60 true\nfinish\n'
    )
    finished = run_script(str(script), tmp_path)
    assert finished.returncode == 1
    page = (tmp_path / "out" / "example.md").read_text(encoding="utf-8")
    assert results(page) == {
        "first": "FAILED (exit status 1)",
        "slow": "FAILED (stopped after 1 s)",
        "second": "passed",
        "third": "not run: no time left",
    }
    assert "## second\n\nof the second" in page


@pytest.mark.parametrize("name", ["1_correct.sh", "2_baseline.sh", "3_kernels.sh", "4_train.sh"])
def test_help(tmp_path: Path, name: str) -> None:
    result = run_script(f"examples/benchmark/gpu/{name}", tmp_path, "--help")
    assert result.returncode == 0
    assert "--device cpu: a rehearsal" in result.stdout
    assert not (tmp_path / "out").exists()
