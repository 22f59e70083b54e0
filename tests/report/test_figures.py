"""Scores of seeds, the density of Figure 1a against a sum of Gaussians, and the panels of scores over the cost."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from benchmark_summary import LAST
from failures import error_line

from amos_fairseq.cli.main import main
from amos_fairseq.downstream.results import RunResult, read_summary, write_record
from amos_fairseq.report.figures import density, loss_distributions, scores_figure


def test_density_is_a_sum_of_gaussians_reflected_at_zero():
    values, points = np.array([0.05, 0.4, 0.5, 2.0]), np.linspace(0, 8, 4001)
    width = values.std(ddof=1) * len(values) ** (-1 / 5)  # Scott's rule

    def kernel(x: float, at: float) -> float:
        return math.exp(-0.5 * ((x - at) / width) ** 2) / (width * math.sqrt(2 * math.pi))

    expected = [sum(kernel(x, at) + kernel(x, -at) for at in values) / len(values) for x in points]
    found = density(values, points)
    assert found == pytest.approx(expected)
    assert np.trapezoid(found, points) == pytest.approx(1, abs=1e-4)
    for equal in ([1.5, 1.5], []):
        assert density(np.array(equal), points) is None


def test_each_group_has_a_histogram_a_curve_and_its_mean():
    values = np.array([0.5, 1.0, 3.0])
    figure = loss_distributions({"a $run": {"depth 1": values, "depth 2": np.array([2.0, 2.0])}, "b": {}})
    first, second = figure.axes[:2]
    assert first.get_title() == r" a \$run"
    assert sum(patch.get_height() * patch.get_width() for patch in first.patches[:40]) == pytest.approx(1)
    curve, mean, mean_without_curve = first.get_lines()
    assert len(curve.get_xdata()) == 400
    assert (mean.get_xdata()[0], mean_without_curve.get_xdata()[0]) == (1.5, 2.0)
    labels = [text.get_text() for text in first.get_legend().get_texts()]
    assert labels == [" depth 1, mean 1.50", " depth 2, mean 2.00"]
    assert second.get_lines() == []


def results(folder, **scores):
    """Write a summary as ``amos glue`` does; ``scores``: task -> the accuracies of its seeds."""
    runs = [
        RunResult(task, "", seed, "runs/task", "accuracy", {"accuracy": value, "f1": 0.0}, *LAST)
        for task, values in scores.items()
        for seed, value in enumerate(values, start=1)
    ]
    content = {"benchmark": "glue", "setup": {"from_scratch": False}, "tasks": {}, "notes": []}
    content |= {"checkpoint": {"file": "model.pt", "num_updates": 1}, "runs": list(map(asdict, runs))}
    folder.mkdir(exist_ok=True)
    write_record(folder / "glue.json", content)
    return folder / "glue.json"


def figure_of(*files):
    return scores_figure([read_summary(file, "") for file in files])


def test_markers_of_seeds_and_bars_of_medians(tmp_path):
    ours, base = results(tmp_path / "ours", RTE=[50.0, 60.0, 52.0], CoLA=[10.0]), results(tmp_path / "base", RTE=[48.0])
    figure = figure_of(ours, base)
    ax = figure.axes[0]
    assert [label.get_text().strip() for label in ax.get_xticklabels()] == ["RTE", "CoLA"]
    assert [sorted(line.get_ydata()) for line in ax.get_lines()] == [[50.0, 52.0, 60.0], [10.0], [48.0]]
    bars = [collection.get_segments()[0][:, 1].tolist() for collection in ax.collections]
    assert bars == [[52.0, 52.0], [10.0, 10.0], [48.0, 48.0]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" ours", " base"]


def test_command_writes_figures_of_scores(tmp_path, capsys):
    file = results(tmp_path / "ours", RTE=[50.0])
    assert main(["plot", str(file), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"scores.png", "scores.svg"}
    assert str(tmp_path / "out" / "scores.png") in capsys.readouterr().out


def test_invalid_results_are_one_line(tmp_path, capsys):
    whole = results(tmp_path, RTE=[50.0]).read_text()
    for content, message in (
        (whole.replace("50.0", "1e999"), "is not a finite number"),
        (whole.replace("50.0", "95.0"), "glue.json was changed"),
        (results(tmp_path).read_text(), "holds no finished run yet"),
        (None, "glue.json is missing"),
    ):
        (tmp_path / "glue.json").unlink()
        if content is not None:
            (tmp_path / "glue.json").write_text(content)
        assert message in error_line(capsys, main, "plot", tmp_path / "glue.json", "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()
