"""The figure of scores: its content, and which files are refused."""

import json

import pytest

from amos_fairseq.cli.main import main
from amos_fairseq.plotting.scores import read_results, scores_figure


def write_results(directory, name="glue.json", **scores):
    """``scores``: task -> the accuracies of its seeds."""
    directory.mkdir(exist_ok=True)
    runs = [
        {"task": task, "point": "", "seed": seed, "main_score": "accuracy", "scores": {"accuracy": value, "f1": 0.0}}
        for task, values in scores.items()
        for seed, value in enumerate(values, start=1)
    ]
    (directory / name).write_text(json.dumps({"benchmark": "glue", "runs": runs}), encoding="utf-8")
    return str(directory / name)


def test_every_seed_is_a_marker_and_the_median_a_bar(tmp_path):
    files = [
        write_results(tmp_path / "ours", RTE=[50.0, 60.0, 52.0], CoLA=[10.0]),
        write_results(tmp_path / "base", RTE=[48.0]),
    ]
    figure = scores_figure(read_results(files))
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["RTE", "CoLA"]
    assert [sorted(line.get_ydata()) for line in ax.get_lines()] == [[50.0, 52.0, 60.0], [10.0], [48.0]]
    bars = [collection.get_segments()[0][:, 1].tolist() for collection in ax.collections]
    assert bars == [[52.0, 52.0], [10.0, 10.0], [48.0, 48.0]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [" ours", " base"]


def test_command_writes_both_kinds(tmp_path, capsys):
    file = write_results(tmp_path / "ours", RTE=[50.0])
    assert main(["plot", file, "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"scores.png", "scores.svg"}
    assert str(tmp_path / "out" / "scores.png") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no results to plot (No such file or directory)"),
        ("[1]", "holds no results"),
        ('{"runs": [{"task": "RTE"}]}', "holds no results"),
        ('{"runs": []}', "holds no finished run yet"),
    ],
)
def test_other_files_are_one_line(tmp_path, capsys, content, words):
    file = tmp_path / "glue.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["plot", str(file), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "out").exists()


def test_curves_and_scores_do_not_mix(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["plot", write_results(tmp_path, RTE=[50.0]), str(tmp_path)])
    assert "not both" in capsys.readouterr().err
