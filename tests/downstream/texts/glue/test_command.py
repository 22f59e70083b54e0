"""Scores, statistics, tables and the leaderboard's archive against values by hand and the averages that the papers print."""

import math
import shutil
import threading
import zipfile

import numpy as np
import pytest
from benchmark_summary import make_result
from failures import error_line
from scipy.stats import rankdata

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.texts.command import read_text_data
from amos_fairseq.downstream.texts.glue.command import average, glue_table, tasks_to_run, write_submission
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED, TASKS
from amos_fairseq.downstream.texts.scores import text_scores
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import ConstantScores, Summary, best_run, spread_of, summarize
from tests.helpers.benchmark_summary import read_results


def test_scores_by_hand():
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
    labels = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    predictions = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])
    matthews = (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6)
    f1 = 2 * 0.45 / 1.35  # precision 3/4, recall 3/5
    for task, expected in (("CoLA", {"matthews": 100 * matthews}), ("MRPC", {"f1": 100 * f1}), ("RTE", {})):
        found = text_scores("classes", predictions, labels, TASKS[task].scores)
        assert found == pytest.approx(expected | {"accuracy": 70.0})


def test_correlations_are_those_of_their_formulas():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 11, 200) / 2  # many ties, as in STS-B
    predictions = labels + generator.normal(0, 2, 200)

    def pearson(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())

    found = text_scores("number", predictions, labels, TASKS["STS-B"].scores)
    expected = {"pearson": pearson(predictions, labels), "spearman": pearson(rankdata(predictions), rankdata(labels))}
    assert found == pytest.approx({name: 100 * value for name, value in expected.items()})
    assert all(type(value) is float for value in found.values()), "numpy scalars do not go into JSON"


def test_constant_predictions_score_zero():
    constant, labels = np.full(6, 2.5), np.array([0, 1, 2, 3, 4, 5.0])
    assert text_scores("number", constant, labels, TASKS["STS-B"].scores) == {"spearman": 0.0, "pearson": 0.0}
    found = text_scores("classes", np.ones(4, int), np.array([0, 1, 1, 1]), TASKS["CoLA"].scores)
    assert found == {"matthews": 0.0, "accuracy": 75.0}
    assert text_scores("classes", np.zeros(2, int), np.zeros(2, int), TASKS["MRPC"].scores) == {
        "accuracy": 100.0,
        "f1": 0.0,
    }


def test_median_and_deviation_by_hand():
    found = spread_of([70.0, 72.0, 71.0, 75.0, 60.0])
    # mean 69.6; squares 0.16, 5.76, 1.96, 29.16, 92.16; sum 129.2; divided by 4
    assert (found.median, found.count) == (71.0, 5)
    assert found.deviation == pytest.approx(math.sqrt(129.2 / 4))
    assert spread_of([70.0, 72.0]).median == 71.0
    assert spread_of([70.0]).deviation is None


def result(task, seed, main, trial="", **scores):
    name = TASKS[task].main_score
    return make_result(task, seed, name, {name: main, **scores}, trial)


def test_grid_reports_the_trial_of_the_highest_median_and_the_best_run():
    results = [result("RTE", seed, main, "lr1") for seed, main in enumerate((60.0, 61.0, 80.0), start=1)]
    results += [result("RTE", seed, main, "lr2") for seed, main in enumerate((70.0, 65.0, 66.0), start=1)]
    summary = summarize(results)["RTE"]
    assert (summary.trial, summary.num_trials, summary.main.median) == ("lr2", 2, 66.0)
    assert (summary.best.trial, summary.best.seed) == ("lr1", 3)
    # Of equal runs the first seed is best.
    assert best_run([result("RTE", 2, 60.0), result("RTE", 1, 60.0), result("RTE", 3, 59.0)]).seed == 1


def test_average_of_fewer_tasks_and_without_wnli():
    assert average({"CoLA": 50.0, "RTE": 60.0, "WNLI": 0.0}) == ("AVG of 2", 55.0)
    assert average({"WNLI": 50.0}) == ("AVG", None)
    assert len(AVERAGED) == 8


def test_table_cells():
    results = [result("MNLI", seed, 80.0 + seed, accuracy_mm=79.0 + seed) for seed in (1, 2, 3)]
    results += [result("CoLA", seed, 10.0 * seed) for seed in (1, 2, 3)]
    answers = make_result("SQuAD2.0", 1, "f1", {"em": 50.0, "f1": 52.25})
    squad = Summary("squad", {}, summarize([answers]), [], [answers])
    constant = {"MNLI": ConstantScores(9, {"most frequent class": {"accuracy": 35.0, "accuracy_mm": 36.0}})}
    constant |= {"CoLA": ConstantScores(9, {"most frequent class": {"matthews": 0.0, "accuracy": 69.0}})}
    table = glue_table("ours", summarize(results), constant, squad, notes=["a note | with a bar"])
    assert table.columns == ["", "MNLI m/mm", "CoLA (Matthews)", "AVG of 2", "SQuAD2.0 EM", "SQuAD2.0 F1"]
    assert table.rows == [
        ["ours", "82.0 ± 1.0 / 81.0 ± 1.0", "20.0 ± 10.0", "51.0", "50.0", "52.2"],
        ["most frequent class, or mean", "35.0 / 36.0", "0.0", "17.5", "-", "-"],
    ]
    markdown = table.as_markdown().splitlines()
    assert markdown[2] == "|  | MNLI m/mm | CoLA (Matthews) | AVG of 2 | SQuAD2.0 EM | SQuAD2.0 F1 |"
    assert markdown[4] == "| ours | 82.0 ± 1.0 / 81.0 ± 1.0 | 20.0 ± 10.0 | 51.0 | 50.0 | 52.2 |"
    assert markdown[7] == "- a note | with a bar"


@pytest.mark.slow
def test_archive_of_the_leaderboard(data, tmp_path, glue):
    outcome = glue(tmp_path, "CoLA", "STS-B", "MNLI", "RTE", with_test=True, seeds=2)
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    official = {"SST-2": 1821, "MRPC": 1725, "QNLI": 5463, "QQP": 390965, "RTE": 3000, "WNLI": 146}
    official |= {"CoLA": 1063, "STS-B": 1379, "MNLI-m": 9796, "MNLI-mm": 9847, "AX": 1104}
    predicted = {"CoLA": 7, "STS-B": 5, "MNLI-m": 6, "MNLI-mm": 4, "AX": 3}
    assert {name: len(lines) - 1 for name, lines in files.items()} == {f"{n}.tsv": rows for n, rows in official.items()}
    assert {lines[0] for lines in files.values()} == {"index\tprediction"}
    assert [line.split("\t")[0] for line in files["MNLI-mm.tsv"][1:]] == list(map(str, range(9847)))
    # RTE was run, but no test file was prepared; SST-2 was not run at all.
    missing = {f"{name}.tsv: {rows - predicted.get(name, 0):,} of {rows:,}" for name, rows in official.items()}
    assert {notice.split(" rows")[0] for notice in outcome.notices} == missing
    assert {line.split("\t")[1] for line in files["RTE.tsv"][1:]} == {"entailment"}
    summaries = summarize(read_results(tmp_path))
    for task, name, split in (("CoLA", "CoLA", "test"), ("MNLI", "MNLI-mm", "test1"), ("MNLI", "AX", "test")):
        prepared = read_text_data(data / ("AX" if name == "AX" else task))
        best = max((r for r in read_results(tmp_path) if r.task == task), key=lambda result: result.main)
        assert summaries[task].best.seed == best.seed
        checkpoint = tmp_path / best.directory / "checkpoint_best.pt"
        logits = prepared.logits(load_checkpoint(checkpoint), split, 80, "cpu", threading.Event())
        expected = logits.argmax(1)
        written = [line.split("\t")[1] for line in files[f"{name}.tsv"][1:]]
        assert written[: len(expected)] == [prepared.label_names[i] for i in expected]
        assert set(written[len(expected) :]) == {prepared.label_names[0]}
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in files["STS-B.tsv"][1:])
    (tmp_path / best.directory / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match=r"runs/MNLI/.*/checkpoint_best\.pt"):
        write_submission(tmp_path, {"MNLI": read_text_data(data / "MNLI")}, summaries, 80, "cpu", threading.Event())


def test_mistakes_are_one_line_and_start_nothing(start, data, tmp_path, fake_training, capsys, glue):
    glue(tmp_path / "finished", "CoLA")
    foreign = tmp_path / "foreign"
    shutil.copytree(data, foreign)
    (foreign / "CoLA" / "tokenizer" / "dict.txt").write_text("other 1\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "squad.json").write_text("{}")
    command = ["glue", "--checkpoint", start, "--out", tmp_path / "out", "--cpu", "--data", data]
    before = len(fake_training.commands)
    for arguments, message in (
        (["--tasks", "QNLI"], "QNLI/task.json is missing: give a folder that amos prepare wrote"),
        (["--data", foreign, "--tasks", "CoLA"], "the data do not fit the checkpoint"),
        (["--tasks", "CoLA", "--recipe", "x" * 300], "File name too long"),
        (["--tasks", "CoLA", "--seeds", "0"], "argument --seeds: 0 must be at least 1 and at most 10,000"),
        (["--tasks", "CoLA", "--set", "weight_decay=[1"], "--set weight_decay=[1: give NAME=VALUE"),
        (["--tasks", "CoLA", "--set", "weigth_decay=1"], "Key 'weigth_decay' not in 'Hyperparameters'"),
        (["--tasks", "CoLA", "--lr", "-1"], "--lr -1.0 must be above 0"),
        (["--tasks", "CoLA", "--batch-size", "0"], "--batch-size 0 must be 1 or more"),
        (["--tasks", "CoLA", "--precision", "fp16"], "--precision fp16 needs a GPU"),
        (
            ["--tasks", "CoLA", "--out", tmp_path / "damaged"],
            "squad.json is not readable as a table of results: write it",
        ),
        (["--tasks", "RTE", "--write-test"], "there is no test set of RTE"),
        (["--tasks", "CoLA", "--teachers", tmp_path / "finished"], "with --write-train"),
        (["--tasks", "CoLA", "--multi-task"], "the recipe amos has no settings for multi"),
        (["--tasks", "RTE", "--multi-task", "--recipe", "bam"], "has 16 rows, fewer than the 128 of one update"),
    ):
        assert message in error_line(capsys, main, *command, *arguments, reports_progress=True)
    (checkpoint,) = (tmp_path / "finished").rglob("checkpoint_best.pt")
    export = ["export", checkpoint, tmp_path / "hf", "--head", "RTE"]
    assert "--head RTE" in error_line(capsys, main, *export, reports_progress=True)
    assert len(fake_training.commands) == before
    assert not (tmp_path / "out").exists()


def test_all_means_the_tasks_that_are_prepared(tmp_path, capsys):
    for task in ("RTE", "CoLA", "WNLI"):
        (tmp_path / task).mkdir()
    assert tasks_to_run("all", tmp_path, is_raw=False) == ["CoLA", "RTE"]
    absent = "MNLI, QQP, QNLI, SST-2, MRPC, STS-B"
    assert capsys.readouterr().err == f"glue: not in {tmp_path}, so not fine-tuned: {absent}\n"
    assert tasks_to_run("RTE,MNLI", tmp_path, is_raw=False) == ["RTE", "MNLI"]  # named, so MNLI is missed later
    assert len(tasks_to_run("ALL", tmp_path / "absent", is_raw=False)) == 8
