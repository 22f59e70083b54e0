"""Records of results: what is written is read back, and a file that cannot be read is one line."""

import subprocess
import sys

import pytest
from benchmark_summary import make_result, write_summary
from tiny_runs import ROOT

from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import (
    Summary,
    best_runs,
    divide,
    read_result,
    read_summary,
    summarize,
    summarize_divided,
    write_result,
)


def test_results_are_read_without_pytorch_and_fairseq():
    code = "import sys, amos_start; amos_start.start(); import amos_fairseq.experiments.records; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "amos_fairseq.experiments.records" in printed.split()
    assert not {"torch", "fairseq", "numpy"} & set(printed.split())


def test_the_summary_of_a_command_is_read_back(tmp_path, capsys):
    write_summary(tmp_path, 5, tmp_path / "run", RTE=50.0, MNLI=60.0)
    summary = read_summary(tmp_path, "glue", "amos glue")
    assert isinstance(summary, Summary)
    assert (summary.weights, summary.save_dir) == ("5 updates", tmp_path / "run")
    spreads = {task: of_task.scores["accuracy"] for task, of_task in summary.tasks.items()}
    assert {task: (spread.median, spread.deviation, spread.count) for task, spread in spreads.items()} == {
        "RTE": (50.0, 0.5, 3),
        "MNLI": (60.0, 0.5, 3),
    }
    assert {task: run.seed for task, run in best_runs(tmp_path, "glue", "amos glue").items()} == {"RTE": 3, "MNLI": 3}
    assert "glue: runs/RTE/00000000/seed3 was selected on dev (accuracy 50.5)\n" in capsys.readouterr().err
    assert read_summary(tmp_path, "squad", "amos squad") is None
    with pytest.raises(UserError, match=r"has no squad\.json: give the --out of amos squad, once it has ended"):
        best_runs(tmp_path, "squad", "amos squad")


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_file_that_cannot_be_read_is_one_line(text, tmp_path):
    for name in ("result.json", "glue.json"):
        (tmp_path / name).write_text(text)
    for read, what in (
        (lambda: read_result(tmp_path), r"result\.json is not readable as the result of a run: write it again with"),
        (lambda: read_summary(tmp_path, "glue", "amos glue"), r"as a table of results: write it again with amos glue$"),
    ):
        with pytest.raises(UserError, match=what):
            read()


@pytest.mark.parametrize("scores", [{"accuracy": float("nan")}, {"accuracy": 61.0, "mse": float("inf")}])
def test_scores_that_are_not_finite_are_not_written(tmp_path, scores):
    with pytest.raises(UserError, match=r"are not finite: give a lower --lr"):
        write_result(tmp_path, make_result("Toy", 1, "accuracy", scores))
    assert not list(tmp_path.rglob("result.json"))


def test_a_run_of_several_tasks_has_a_result_for_each():
    """Trial and best run are those of the average, although RTE alone is better with the other."""
    scores = {("a", 1): (50.0, 80.0, 20.0), ("b", 1): (60.0, 70.0, 50.0), ("b", 2): (64.0, 68.0, 60.0)}
    results = [
        make_result("multi", seed, "average", {"average": mean, "RTE accuracy": rte, "CoLA matthews": cola}, trial)
        for (trial, seed), (mean, rte, cola) in scores.items()
    ]
    parts, summaries = summarize_divided(results, lambda run: divide(run, {"RTE": "accuracy", "CoLA": "matthews"}))
    assert [(part.task, part.trial, part.main) for part in parts][:2] == [("RTE", "a", 80.0), ("CoLA", "a", 20.0)]
    assert {task: (one.trial, one.main.median) for task, one in summaries.items()} == {
        "RTE": ("b", 69.0),
        "CoLA": ("b", 55.0),
    }
    assert {one.best.seed for one in summaries.values()} == {2}
    assert {one.num_trials for one in summaries.values()} == {2}


@pytest.mark.parametrize(
    ("linear", "trained", "chosen"),
    [
        (69.9, [64], ""),
        (70.1, [64], "linear"),
        (70.1, [60, 61, 65], ""),
        (71.1, [60, 61, 65], "linear"),
    ],
)
def test_a_linear_model_has_to_be_better_by_two_standard_errors(linear, trained, chosen):
    """Than the best run of several seeds, too."""
    results = [make_result("t", seed, "accuracy", {"accuracy": score}) for seed, score in enumerate(trained)]
    other = make_result("t", 1, "accuracy", {"accuracy": linear, "accuracy_error": 3.0}, trial="linear")
    summary = summarize([*results, other])["t"]
    assert (summary.trial, summary.best.trial, *summary.beside) == (chosen, chosen, "" if chosen else "linear")
