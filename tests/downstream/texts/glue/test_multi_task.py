"""Teachers, and several tasks in one run, on synthetic rows without the training process."""

import dataclasses
import json
import re
import threading
import zipfile

import numpy as np
import pytest
from synthetic_glue import INFERENCE, folders, session

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.texts.command import read_text_data
from amos_fairseq.downstream.texts.glue.command import GlueOptions, open_glue, read_teachers
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.table import run_benchmark
from tests.helpers.benchmark_summary import read_results


def test_each_seed_learns_from_the_same_seed(start, data, tmp_path, fake_training):
    out = tmp_path / "single"
    options = GlueOptions(with_train=True)
    run_benchmark(open_glue(session(start, out), folders(data, ["CoLA", "STS-B"]), options))
    teachers = read_teachers(out)
    cola = read_text_data(data / "CoLA")
    one, two = (teachers.predictions(cola, seed)[0] for seed in (1, 2))
    assert np.abs(one - two).max() > 1e-3
    np.testing.assert_allclose(one.sum(1), 1, rtol=1e-6)
    with pytest.raises(UserError, match=r"has no predictions for CoLA of seed 3; it has CoLA .seeds 1, 2., STS-B"):
        teachers.predictions(cola, 3)
    labels = dataclasses.replace(cola, record=cola.record | {"labels": ["1", "0"]})
    with pytest.raises(UserError, match="is damaged, or for other rows: give the same files"):
        read_teachers(out).predictions(labels, 1)
    # Other teachers make another run, which has their predictions as a file.
    student = open_glue(session(start, tmp_path / "own"), folders(data, ["CoLA"]), GlueOptions(teachers=teachers))
    runs = student.plan()
    assert len({run.directory.parent.name for run in runs}) == 2
    run_benchmark(student)
    flags = fake_training.commands[-1]
    updates = fake_training.flag(flags, "--total-num-update")
    assert fake_training.flag(flags, "--max-update") == updates == str(10 * 2)  # 40 rows in batches of 32, 10 epochs
    (beside,) = (tmp_path / "own" / "runs" / "CoLA").glob("*/seed2/teacher.npy")
    np.testing.assert_array_equal(np.load(beside), two.ravel())


def test_a_run_of_all_tasks_has_a_row_of_single_tasks(start, data, tmp_path, fake_training, monkeypatch):
    """The trial of a grid is that of the best average, although RTE alone is better with the other; the weights that stay are
    those of the best mean of both scores."""
    recipe = tmp_path / "recipe.yaml"
    settings = "grid: {layer_wise_lr_decay: [1.0, 0.9]}\ntasks: {multi: {epochs: 6, batch_size: 16}}"
    recipe.write_text(f"extends: bam\nsizes: {{}}\n{settings}\n")
    scores = {1: (70.0, 10.0), 2: (60.0, 40.0), 3: (65.0, 20.0)}  # means of 40, 50 and 42.5
    opened = session(start, tmp_path / "out", seeds=3, recipe=str(recipe))
    benchmark = open_glue(opened, folders(data, ["RTE", "STS-B"]), GlueOptions(multi_task=True))

    trials = {run.directory.parent.name: run.trial for run in benchmark.plan()}

    def evaluate(task, checkpoint, device, stop):
        rte, stsb = scores[int(checkpoint.parent.name.removeprefix("seed"))]
        if "1.0" in trials[checkpoint.parent.parent.name]:
            rte, stsb = rte + 20, stsb - 40
        return {"average": (rte + stsb) / 2, "RTE accuracy": rte, "STS-B spearman": stsb, "STS-B pearson": 1.0}

    monkeypatch.setattr(benchmark, "evaluate", evaluate)
    table = run_benchmark(benchmark).table
    assert table.rows[0] == ["amos (7 updates), one model for all tasks", "65.0 ± 5.0", "20.0 ± 15.3", "42.5"]
    assert table.rows[1][0] == "most frequent class, or mean"
    assert table.columns == ["", "RTE", "STS-B (Spearman)", "AVG of 2"]
    assert any("selected from 2 combinations" in note for note in table.notes)
    content = json.loads((tmp_path / "out" / "glue.json").read_text())
    assert {task: own["best"]["seed"] for task, own in content["tasks"].items()} == {"RTE": 2, "STS-B": 2}
    (kept,) = [path.parent for path in tmp_path.rglob("*.pt") if "multi" in str(path)]
    assert (trials[kept.parent.name], kept.name) == ("layer_wise_lr_decay0.9", "seed2")
    assert sorted({run["task"] for run in content["runs"]}) == ["RTE", "STS-B"]
    assert len(read_results(tmp_path / "out")) == 6
    flags = fake_training.commands[0]
    assert fake_training.flag(flags, "--task") == "multi_task"
    rows = 17 + 20  # 20^0.25 * 16^0.75 is 16.9
    assert fake_training.flag(flags, "--total-num-update") == str(rows * 6 // 16)


def test_the_archive_of_one_model_has_all_test_sets(start, data, tmp_path, fake_training):
    """AX, which has no head of its own, is predicted by that of MNLI."""
    opened = session(start, tmp_path, seeds=1, recipe="bam", batch_size=8)
    options = GlueOptions(with_test=True, multi_task=True)
    outcome = run_benchmark(open_glue(opened, folders(data, ["CoLA", "MNLI", "AX"]), options))
    assert outcome.failures == []
    notices = "\n".join(outcome.notices)
    empty = {name for name, _ in re.findall(r"^(\S+)\.tsv: ([\d,]+) of \2 rows have no", notices, re.MULTILINE)}
    assert "RTE" in empty
    assert not {"CoLA", "MNLI-m", "MNLI-mm", "AX"} & empty
    (checkpoint,) = (tmp_path / "runs" / "multi").glob("*/seed1/checkpoint_last.pt")
    loaded = load_checkpoint(checkpoint)
    logits = read_text_data(data / "AX").logits(loaded, "test", 80, "cpu", threading.Event())
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        lines = archive.read("AX.tsv").decode().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines[: len(logits)]] == [INFERENCE[index] for index in logits.argmax(1)]
