"""Training curves against the given records."""

import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from amos_fairseq.report import curves as plotting

BY_DEPTH, AUC = (panel for panel in plotting.PANELS if panel.key in ("mlm_loss_", "rtd_auc"))


def record(split, update, depths=(1, 2), **values):
    per_depth = {f"mlm_loss_{d}": 5.0 - d - update / 100 for d in depths} | {f"mixture_{d}": d / 10 for d in depths}
    train = {"lr": update / 1e4, "wps": 1000.0 + update} if split == "train" else {}
    detection = {"rtd_recall": 0.25, "rtd_auc": 0.6, "mixture_entropy": 0.5}
    return {"split": split, "update": update, "epoch": 0.5, **per_depth, **detection, **train, **values}


def write(save_dir, *records):
    save_dir.mkdir(exist_ok=True)
    (save_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return save_dir


@pytest.fixture
def save_dir(tmp_path):
    """A run of two depths with a null in the training loss and one validation."""
    records = [record("train", 10), record("train", 20, mlm_loss_2=None), record("train", 30), record("valid", 30)]
    return write(tmp_path / "run", *records)


def test_curves_hold_the_records(save_dir):
    curves = plotting.read_log(save_dir)
    assert curves["train"]["mlm_loss_1"].updates == [10, 20, 30]
    assert curves["train"]["mlm_loss_1"].values == pytest.approx([3.9, 3.8, 3.7])
    assert math.isnan(curves["train"]["mlm_loss_2"].values[1])
    assert curves["valid"]["rtd_auc"].values == [0.6]
    assert "lr" not in curves["valid"]
    with (save_dir / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "upd')  # the run is writing
    assert str(plotting.read_log(save_dir)) == str(curves)  # as text: nan is unequal to itself


def test_one_of_several_validation_subsets_is_drawn(tmp_path, capsys):
    write(tmp_path, record("valid", 10), record("test", 10, rtd_auc=0.9), record("valid", 20))
    curves = plotting.read_log(tmp_path)
    assert (curves["valid"]["rtd_auc"].updates, curves["valid"]["rtd_auc"].values) == ([10, 20], [0.6, 0.6])
    assert "the validation subset valid is drawn; left out: test" in capsys.readouterr().out


def test_unigram_entropy_is_a_line_for_each_text(save_dir, tmp_path):
    """The last one that validation logged; runs on the same text share it, one without it has none."""
    others = []
    for name, entropies in {"same": (5.0, 6.125), "another": (5.5,), "without": (None,)}.items():
        values = [{} if entropy is None else {"unigram_entropy": entropy} for entropy in entropies]
        others.append(write(tmp_path / name, *(record("valid", 10, **value) for value in values)))
    with (save_dir / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(record("valid", 40, unigram_entropy=6.125)) + "\n")
    _, ax = plt.subplots()
    plotting.draw_panel(ax, BY_DEPTH, plotting.read_curves([save_dir, *others]))
    plt.close()
    levels = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert levels[-2:] == [5.5, 6.125]
    assert [text.get_text() for text in ax.texts] == [f"{plotting.UNIGRAM[1]} {value}" for value in ("5.50", "6.12")]


LOGGED = {
    "pretraining": (
        [record("train", 10, loss=9.0)],
        ["mlm_loss", "mixture", "recall", "auc", "learning_rate", "throughput"],
    ),
    "teams": ([{"split": "train", "update": 5, "mws_loss": 1.0, "mlm_loss_3": 2.0}], ["mlm_loss", "selection_loss"]),
    "fine-tuning": (
        [
            {"split": "train", "update": 5, "loss": 2.0, "lr": 0.1, "wps": 9},
            {"split": "valid", "update": 5, "spearman": 58.4, "wps": 3},
        ],
        ["loss", "spearman", "learning_rate", "throughput"],
    ),
    "nothing": ([{"split": "valid", "update": 5, "mixture_entropy": 1.0, "wps": 3}], []),
}


@pytest.mark.parametrize("kind", LOGGED)
def test_a_panel_for_each_logged_value(kind, tmp_path):
    """The loss of pretraining has none, and neither has the throughput of validation."""
    records, panels = LOGGED[kind]
    curves = plotting.read_curves([write(tmp_path, *records)])
    assert [panel.file_name for panel in plotting.logged_panels(curves)] == panels


def test_a_figure_has_the_curves_of_all_runs(save_dir, tmp_path):
    """Training as a line and validation as a marker, for each run and depth."""
    other = write(tmp_path / "$other", record("train", 10), record("valid", 30))
    curves = plotting.read_curves([save_dir, other])
    figure = plotting.panels_figure([BY_DEPTH, AUC], curves)
    by_depth, auc = figure.axes
    assert [list(line.get_xdata()) for line in by_depth.get_lines()] == [[10, 20, 30], [30]] * 2 + [[10], [30]] * 2
    assert [text.get_text() for text in by_depth.get_legend().get_texts()] == ["depth 1", "depth 2"]
    assert [line.get_ydata()[0] for line in auc.get_lines()] == [0.6] * 4 + [0.5]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [" run", r" \$other", "line: training", "marker: validation"]


def test_a_legend_of_many_depths_has_eight_and_few_values_are_points(tmp_path):
    """The first and the last depth, and six at equal distances; points of one training record are visible, of 31 in the way."""
    depths = range(1, 23)
    for records in (1, 2, 31):
        run = write(tmp_path / str(records), *(record("train", 10 * n, depths) for n in range(1, records + 1)))
        by_depth, auc = plotting.panels_figure([BY_DEPTH, AUC], plotting.read_curves([run])).axes
        names = [text.get_text() for text in by_depth.get_legend().get_texts()]
        assert names == [f"depth {n}" for n in (1, 4, 7, 10, 13, 16, 19, 22)]
        colours = [handle.get_color() for handle in by_depth.get_legend().legend_handles]
        assert colours == [by_depth.get_lines()[n - 1].get_color() for n in (1, 4, 7, 10, 13, 16, 19, 22)]
        assert auc.get_lines()[0].get_marker() == {1: "_", 2: ".", 31: "None"}[records]


def test_each_group_has_a_histogram_and_its_mean():
    values = np.array([0.5, 1.0, 3.0])
    figure = plotting.loss_distributions({"a $run": {"depth 1": values, "depth 2": np.array([2.0, 2.0])}, "b": {}})
    first, second = figure.axes[:2]
    assert first.get_title() == r" a \$run"
    heights, _ = np.histogram(values, bins=40, range=(0, 3), density=True)
    assert sorted(set(first.patches[0].get_xy()[:, 1])) == pytest.approx(sorted(set(heights)))
    assert [line.get_xdata()[0] for line in first.get_lines()] == [1.5, 2.0]
    labels = [text.get_text() for text in first.get_legend().get_texts()]
    assert labels == [" depth 1, mean 1.50", " depth 2, mean 2.00"]
    assert second.get_lines() == []
