"""Summaries of benchmarks as the table and the curve of the report show them, by hand."""

from pathlib import Path

import pytest
from benchmark_summary import write_summary, write_tagging

from amos_fairseq.errors import UserError
from amos_fairseq.report.results import benchmark_table, num_seeds, points_over_cost, read_benchmarks
from amos_fairseq.report.runs import PretrainingRun


@pytest.fixture
def results(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    folders = [
        write_summary(tmp_path / "a", 2000, run, MNLI=70.0, RTE=55.0),
        write_summary(tmp_path / "b", 1000, run, MNLI=60.0),
        write_summary(tmp_path / "c", 1000, run, from_scratch=True, MNLI=35.0),
        write_summary(tmp_path / "d", 500, other, MNLI=50.0),
        write_summary(tmp_path / "e", 700, other, MNLI=52.0),
    ]
    return read_benchmarks(folders, "--glue")


def test_one_row_for_each_summary(results):
    table = benchmark_table(results)
    assert table.columns == ["", "MNLI m", "MNLI mm", "RTE"]
    assert table.rows[:3] == [
        ["run, 2,000 updates", "70.0 ± 0.5", "71.0 ± 0.5", "55.0 ± 0.5"],
        ["run, 1,000 updates", "60.0 ± 0.5", "61.0 ± 0.5", "-"],
        ["run, random weights", "35.0 ± 0.5", "36.0 ± 0.5", "-"],
    ]
    assert table.notes == ["a note"]
    assert num_seeds(results) == "3 seeds"
    twice = benchmark_table(results[3:4] * 2)
    assert [row[0] for row in twice.rows] == ["other, 500 updates (d)"] * 2


def test_results_of_tagging(tmp_path):
    """As amos tag writes them: accuracy of words, span F1 of IOB labels; two checkpoints make a curve."""
    folders = [write_tagging(tmp_path / str(updates), updates, tmp_path / "mine" / "run") for updates in (10, 20)]
    (tmp_path / "10" / "tagging.setup.json").write_text("{}")
    results = read_benchmarks(folders, "--tag")
    table = benchmark_table(results)
    assert table.columns == ["", "upos", "chunk (span F1)"]
    assert table.rows == [[f"mine, {updates} updates", "81.0 ± 1.4", "62.0 ± 2.8"] for updates in (10, 20)]
    assert table.notes == ["a span is right if its type and both ends are (conlleval's rules, computed by seqeval)"]
    panels, _, _ = points_over_cost(results, [])
    assert [series.points for series in panels["upos"]] == [[(10, 81.0, 2**0.5), (20, 81.0, 2**0.5)]]


def test_results_of_any_table(tmp_path):
    """amos classify trains random weights beside the checkpoint; they are no score of it."""
    scores = {"classification": 80.0, "classification-random": 60.0}
    write_summary(tmp_path / "own", 0, tmp_path / "mine" / "run", benchmark="classification", **scores)
    table = benchmark_table(read_benchmarks([str(tmp_path / "own")], "--glue"))
    assert table.columns == ["", "classification"]
    assert table.rows == [["mine, as imported", "80.0 ± 0.5"]]


def test_rows_of_baselines_and_notes_of_single_results(tmp_path):
    """The constant is equal for both models, the linear model is not; what is said of one names it."""
    folders = []
    for name, linear, note in (("a", 57.0, "4.8"), ("b", 61.0, "4.7")):
        scores = {"most frequent class": {"accuracy": 54.0}, "linear": {"accuracy": linear, "f1": 1.0}}
        more = {
            "baselines": {"classification": {"num_scored": 100, "scores": scores, "data_sha256": "d" * 64}},
            "notes": ["a note", note],
        }
        of_run = (tmp_path / name, 5, tmp_path / name / "run")
        folders.append(write_summary(*of_run, benchmark="classification", **more, classification=65.0))
    table = benchmark_table(read_benchmarks(folders, "--glue"))
    linear = [["a, 5 updates: linear", "57.0"], ["b, 5 updates: linear", "61.0"]]
    assert table.rows[2:] == [["most frequent class", "54.0"], *linear]
    assert table.notes == ["a note", "a, 5 updates: 4.8", "b, 5 updates: 4.7"]


def test_a_column_that_a_checkpoint_has_twice_is_not_drawn(results):
    panels, _, notes = points_over_cost([*results, results[0]], [])
    assert "MNLI m" not in panels or "run" not in {series.label for series in panels["MNLI m"]}
    assert "run, MNLI m is left out: a checkpoint has two results; give one table" in notes


def test_scores_over_updates_and_over_flops(results, tmp_path):
    panels, unit, _ = points_over_cost(results, [])
    assert unit == "updates"
    assert list(panels) == ["MNLI m", "MNLI mm"]
    points = {"run": [(1000, 60.0, 0.5), (2000, 70.0, 0.5)], "other": [(500, 50.0, 0.5), (700, 52.0, 0.5)]}
    assert {series.label: series.points for series in panels["MNLI m"]} == points
    costs = {"run": 3, "other": 10}
    runs = [PretrainingRun(tmp_path / name, name, flops_per_update=cost) for name, cost in costs.items()]
    panels, unit, _ = points_over_cost(results, runs)
    assert unit == "FLOPs of pretraining"
    assert [series.points[0][0] for series in panels["MNLI mm"]] == [3000, 5000]
    assert points_over_cost(results[:1], runs) == ({}, "updates", [])
    # 10 hours of 4,000 updates are 2.5 at update 1,000.
    runs = [PretrainingRun(tmp_path / name, name, num_updates=4000, seconds=36_000) for name in costs]
    panels, unit, _ = points_over_cost(results, runs, "hours")
    assert unit == "hours of pretraining"
    assert [series.points[0][0] for series in panels["MNLI mm"]] == pytest.approx([2.5, 1.25])
    assert points_over_cost(results, runs, "updates")[1] == "updates"
    for known, over in ((runs[:1], "hours"), (runs, "flops")):
        with pytest.raises(UserError, match=f"--over {over}: those of .* are unknown; give its SAVE_DIR as RUN"):
            points_over_cost(results, known, over)


def test_a_folder_without_results_is_one_line(tmp_path):
    file = Path(write_summary(tmp_path / "a", 5, tmp_path / "run", RTE=50.0)) / "glue.json"
    file.write_text(file.read_text().replace("50.0", "60.0"))
    with pytest.raises(UserError, match=r"glue\.json was changed.*: repeat the command that wrote it"):
        read_benchmarks([str(file.parent)], "--glue")
    file.unlink()
    with pytest.raises(UserError, match="holds no results: give the --out of the command as --glue"):
        read_benchmarks([str(file.parent)], "--glue")
