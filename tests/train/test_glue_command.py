"""``amos glue`` for real: two tasks, stopped in the first training and continued."""

import json
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from forked_command import run_main
from interrupted_run import BackgroundRun
from synthetic_glue import write_glue, write_pretrained_checkpoint
from tiny_runs import run_of

from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.cli.main import main
from amos_fairseq.run.metrics_file import read_records

# Long enough for a signal to find the first task training; the rest is short.
RECIPE = """\
defaults:
  {batch_size: 32, warmup: 0.1, lr: 3e-3, weight_decay: 0.01, pooler_dropout: 0.1, layer_wise_lr_decay: 0.9,
   bias_correction: false, head: linear, num_separators: 2}
tasks: {CoLA: {epochs: 25}, STS-B: {epochs: 2}}
"""
UPDATES = 50  # 64 rows are two batches an epoch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("glue")
    (root / "start").mkdir()
    write_pretrained_checkpoint(root / "start")
    write_glue(root / "data", root / "start", "CoLA", ["0", "1"], {"train": 64, "valid": 24}, pair=False)
    write_glue(root / "data", root / "start", "STS-B", [], {"train": 40, "valid": 20, "test": 7}, pair=True)
    (root / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return root


def command(place: Path, out: str, tasks: str, *flags: str) -> list[str]:
    arguments = ["--checkpoint", place / "start", "--data", place / "data", "--out", place / out, "--tasks", tasks]
    arguments += ["--seeds", 1, "--recipe", place / "recipe.yaml", "--cpu", *flags]
    return ["glue", *map(str, arguments)]


@pytest.mark.slow
def test_two_tasks_stopped_and_continued(place):
    def updates() -> list[int]:
        return [one["update"] for folder in place.glob("out/runs/CoLA/*/seed1") for one in read_records(folder)]

    start = [sys.executable, "-m", "amos_start"]
    run = BackgroundRun([*start, *command(place, "out", "CoLA,STS-B")], place / "stopped.log")
    run.wait_until(lambda: max(updates(), default=0) >= 3)
    first = run_of(place / "out", "CoLA")
    run.process.send_signal(signal.SIGINT)
    assert run.exit_code() == 130, run.text()[-3000:]
    assert "stopped; finished runs are in" in run.text()
    assert "Traceback" not in run.text() + (first / "train.log").read_text(encoding="utf-8")
    stood_at = read_state(first / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 3 <= stood_at < UPDATES
    assert not (first / "result.json").exists()

    done = run_main(main, *command(place, "out", "CoLA,STS-B"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Loaded checkpoint {first / 'checkpoint_last.pt'}" in (first / "train.log").read_text(encoding="utf-8")
    assert "AVG of 2" in done.stdout

    summary = json.loads((place / "out" / "glue.json").read_text(encoding="utf-8"))
    runs = {run["task"]: run for run in summary["runs"]}
    assert set(runs) == {"CoLA", "STS-B"}
    for task, run in runs.items():
        directory = place / "out" / run["directory"]
        check_against_validation(directory, run, {"CoLA": "matthews", "STS-B": "spearman"}[task])
        assert [path.name for path in directory.glob("*.pt")] == ["checkpoint_best.pt"]
    check_interruption_left_no_trace(place, runs["CoLA"])


def check_against_validation(directory: Path, run: dict, key: str) -> None:
    """The score of the kept checkpoint is the best that validation saw after an epoch; it rounds to four digits."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    seen = [line[key] for line in lines if line["split"] == "valid" and line[key] is not None]
    assert len(seen) == run["settings"]["hyperparameters"]["epochs"]
    assert run["scores"][run["main_score"]] == pytest.approx(max(seen), abs=1e-4)


def check_interruption_left_no_trace(place: Path, run: dict) -> None:
    """The same run, left alone, has the same predictions: resuming is exact."""
    alone = run_main(main, *command(place, "alone", "CoLA"))
    assert alone.returncode == 0, alone.stderr[-3000:]
    (undisturbed,) = json.loads((place / "alone" / "glue.json").read_text(encoding="utf-8"))["runs"]
    assert (undisturbed["scores"], undisturbed["epoch"]) == (run["scores"], run["epoch"])
    files = [run_of(place / out, "CoLA") / "predictions.valid.tsv" for out in ("out", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_random_weights_and_the_archive_of_the_leaderboard(place):
    done = run_main(main, *command(place, "scratch", "STS-B", "--from-scratch", "--write-test"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(random weights)" in done.stdout
    log = (run_of(place / "scratch", "STS-B") / "train.log").read_text(encoding="utf-8")
    assert "loaded pretrained" not in log.lower()
    with zipfile.ZipFile(place / "scratch" / "glue_submission.zip") as archive:
        header, *rows = archive.read("STS-B.tsv").decode().splitlines()
    assert header == "index\tprediction"
    assert len(rows) == 1379
