"""``amos glue`` for real: two tasks, stopped in the first training and continued."""

import json
import signal
import sys
from pathlib import Path

import pytest
from fine_tuning_tasks import fine_tune, fine_tuning_words
from interrupted_run import BackgroundRun
from synthetic_glue import write_glue, write_pretrained_checkpoint
from tiny_runs import run_of

from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.run.metrics_file import read_records

# Long enough for a signal to find the first task training; the rest is short.
RECIPE = """\
defaults:
  {batch_size: 32, warmup: 0.1, lr: 3e-3, weight_decay: 0.01, pooler_dropout: 0.1, layer_wise_lr_decay: 0.9,
   bias_correction: false, head: linear, num_separators: 2}
tasks: {CoLA: {epochs: 15}, STS-B: {epochs: 2}}
"""
UPDATES = 30  # 64 rows are two batches an epoch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("glue")
    (root / "start").mkdir()
    write_pretrained_checkpoint(root / "start")
    write_glue(root / "data", root / "start", "CoLA", ["0", "1"], {"train": 64, "valid": 24}, pair=False)
    write_glue(root / "data", root / "start", "STS-B", [], {"train": 40, "valid": 20, "test": 7}, pair=True)
    (root / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return root


@pytest.mark.slow
def test_two_tasks_stopped_and_continued(place):
    def updates() -> list[int]:
        return [one["update"] for folder in place.glob("out/runs/CoLA/*/seed1") for one in read_records(folder)]

    data = ["--data", place / "data", "--tasks", "CoLA,STS-B"]
    words = fine_tuning_words("glue", place, place / "out", *data)
    run = BackgroundRun([sys.executable, "-m", "amos_start", *words], place / "stopped.log")
    run.wait_until(lambda: max(updates(), default=0) >= 3)
    first = run_of(place / "out", "CoLA")
    run.process.send_signal(signal.SIGINT)
    assert run.exit_code() == 130, run.text()[-3000:]
    assert "stopped; finished runs are in" in run.text()
    assert "Traceback" not in run.text() + (first / "train.log").read_text(encoding="utf-8")
    stood_at = read_state(first / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 3 <= stood_at < UPDATES
    assert not (first / "result.json").exists()

    printed = fine_tune("glue", place, place / "out", *data)
    assert f"Loaded checkpoint {first / 'checkpoint_last.pt'}" in (first / "train.log").read_text(encoding="utf-8")
    assert "AVG of 2" in printed

    summary = json.loads((place / "out" / "glue.json").read_text(encoding="utf-8"))
    runs = {run["task"]: run for run in summary["runs"]}
    assert set(runs) == {"CoLA", "STS-B"}
    for task, run in runs.items():
        # The score of the kept checkpoint is the best that validation saw after an epoch; it rounds to four digits.
        directory, key = place / "out" / run["directory"], {"CoLA": "matthews", "STS-B": "spearman"}[task]
        seen = [line[key] for line in read_records(directory) if line["split"] == "valid" and line[key] is not None]
        assert len(seen) == run["settings"]["hyperparameters"]["epochs"]
        assert run["scores"][run["main_score"]] == pytest.approx(max(seen), abs=1e-4)
        assert [path.name for path in directory.glob("*.pt")] == ["checkpoint_best.pt"]

    # The same run, left alone, has the same predictions: resuming is exact.
    fine_tune("glue", place, place / "alone", "--data", place / "data", "--tasks", "CoLA")
    (undisturbed,) = json.loads((place / "alone" / "glue.json").read_text(encoding="utf-8"))["runs"]
    assert (undisturbed["scores"], undisturbed["epoch"]) == (runs["CoLA"]["scores"], runs["CoLA"]["epoch"])
    files = [run_of(place / out, "CoLA") / "predictions.valid.tsv" for out in ("out", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_random_weights_and_the_archive_of_the_leaderboard(place):
    flags = ["--data", place / "data", "--tasks", "STS-B", "--from-scratch", "--write-test"]
    assert "(random weights)" in fine_tune("glue", place, place / "scratch", *flags)
    log = (run_of(place / "scratch", "STS-B") / "train.log").read_text(encoding="utf-8")
    assert "loaded pretrained" not in log.lower()
    assert (place / "scratch" / "glue_submission.zip").is_file()
