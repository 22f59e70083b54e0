"""``amos plot`` of training curves against the given records, and errors."""

import json
import math
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from failures import error_line
from matplotlib.figure import Figure

from amos_fairseq.cli.main import main
from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.report import curves as plotting

TRAIN, VALID = ({"split": split, "update": 5} for split in ("train", "valid"))


def record(split, update, depths=(1, 2), **values):
    per_depth = {f"mlm_loss_{d}": 5.0 - d - update / 100 for d in depths} | {f"mixture_{d}": d / 10 for d in depths}
    train = {"lr": update / 1e4, "wps": 1000.0 + update} if split == "train" else {}
    detection = {"rtd_recall": 0.25, "rtd_auc": 0.6, "mixture_entropy": 0.5}
    return {"split": split, "update": update, "epoch": 0.5, **per_depth, **detection, **train, **values}


def write(log, *records):
    log.write_text("".join(json.dumps(each) + "\n" for each in records))


@pytest.fixture
def save_dir(tmp_path):
    """A run of two depths with a null in the training loss and one validation."""
    directory = tmp_path / "run"
    directory.mkdir()
    records = [record("train", 10), record("train", 20, mlm_loss_2=None), record("train", 30), record("valid", 30)]
    write(directory / "metrics.jsonl", *records)
    return directory


def plotted(runs, key):
    """The axes of the panel of ``key``, plotted by the command's own function."""
    panels = [*plotting.PANELS, *plotting.SCORE_PANELS, *plotting.OBJECTIVE_PANELS]
    panel = next(panel for panel in panels if panel.key == key)
    _, ax = plt.subplots()
    plotting.draw_panel(ax, panel, dict(enumerate(runs)))
    plt.close()
    return ax


def test_curves_hold_the_records(save_dir):
    curves = plotting.read_log(save_dir / "metrics.jsonl")
    assert curves["train"]["mlm_loss_1"].updates == [10, 20, 30]
    assert curves["train"]["mlm_loss_1"].values == pytest.approx([3.9, 3.8, 3.7])
    assert math.isnan(curves["train"]["mlm_loss_2"].values[1])
    assert curves["valid"]["rtd_auc"].values == [0.6]
    assert "lr" not in curves["valid"]


def test_each_depth_is_a_training_line_and_validation_markers(save_dir):
    lines = plotted(plotting.read_curves([save_dir]), "mlm_loss_").get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[10, 20, 30], [30], [10, 20, 30], [30]]
    assert [line.get_linestyle() for line in lines] == ["-", "None", "-", "None"]
    colours = [line.get_color() for line in lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]


def test_colours_are_of_depths_and_line_styles_of_runs(save_dir, tmp_path):
    """The records have the entropy of the mixture too, which is not a depth."""
    other = tmp_path / "other.jsonl"
    write(other, *(record("train", update, depths=(2, 10)) for update in (10, 20)))
    runs = plotting.read_curves([save_dir, other])
    ax = plotted(runs, "mixture_")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["depth 1", "depth 2", "depth 10"]
    of_depth_2 = [line for line in ax.get_lines() if line.get_ydata()[0] == 0.2 and len(line.get_xdata()) > 1]
    assert len(of_depth_2) == 2
    assert of_depth_2[0].get_color() == of_depth_2[1].get_color()
    assert of_depth_2[0].get_linestyle() != of_depth_2[1].get_linestyle()


def test_weights_of_other_depths_are_drawn_apart(save_dir, tmp_path):
    """They sum to 1 over the depths of a run. A run keeps its style; losses can be compared on the same axes."""
    files = [save_dir, tmp_path / "other.jsonl", tmp_path / "same.jsonl", tmp_path / "none.jsonl"]
    for file, depths in zip(files[1:], ((2, 10), (1, 2), ()), strict=True):
        write(file, *(record("train", update, depths=depths) for update in (10, 20)))
    runs = plotting.read_curves(files)
    losses, *mixtures = plotting.panels_figure(plotting.PANELS[:2], runs).axes
    assert len(losses.get_legend().get_texts()) == 3
    titles = ["Mixture weights, depths 1, 2", "Mixture weights, depths 2, 10"]
    assert [ax.get_title() for ax in mixtures if ax.axison] == titles
    dashes = [[line.get_linestyle() for line in ax.get_lines() if len(line.get_xdata()) > 1] for ax in mixtures]
    assert dashes[:2] == [["-", "-", ":", ":"], ["--", "--"]]


def test_the_legend_of_runs_with_long_names_is_inside_of_the_figure(save_dir, tmp_path):
    files = [tmp_path / f"electra_with_another_generator_{number}.jsonl" for number in range(4)]
    for file in files:
        write(file, *(record("train", update, depths=(1, 2)) for update in (10, 20)))
    for panels in (plotting.PANELS[:1], plotting.PANELS[:3]):
        figure = plotting.panels_figure(panels, plotting.read_curves(files))
        figure.canvas.draw()
        (legend,) = figure.legends
        inside, drawn = figure.bbox, legend.get_window_extent()
        assert inside.x0 <= drawn.x0 < drawn.x1 <= inside.x1
        assert inside.y0 <= drawn.y0 < drawn.y1 <= inside.y1


def test_unigram_entropy_is_a_line_for_each_text(save_dir, tmp_path):
    """The last one that validation logged; runs on the same text share it, one without it has none."""
    others = []
    for name, entropies in {"same": (5.0, 6.125), "another": (5.5,), "without": (None,)}.items():
        others.append(tmp_path / f"{name}.jsonl")
        values = [{} if entropy is None else {"unigram_entropy": entropy} for entropy in entropies]
        write(others[-1], *(record("valid", 10, **value) for value in values))
    with (save_dir / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(record("valid", 40, unigram_entropy=6.125)) + "\n")
    ax = plotted(plotting.read_curves([save_dir, *others]), "mlm_loss_")
    levels = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert levels[-2:] == [5.5, 6.125]
    assert [text.get_text() for text in ax.texts] == ["unigram entropy 5.50", "unigram entropy 6.12"]


def test_every_key_of_a_criterion_has_a_panel():
    """Keys as the criterions name them for the log."""
    plotted_keys = {panel.key for panel in plotting.OBJECTIVE_PANELS}
    assert set(ElectraCriterion.COUNTED_BY) - {"replaced"} <= plotted_keys
    assert {"mws_loss", "mws_acc"} <= plotted_keys


def test_runs_are_named_by_what_differs_and_by_the_yaml_that_hydra_stored(save_dir, tmp_path):
    paths = [tmp_path / name for name in ("a/run", "b/run", "c.jsonl")]
    assert plotting.distinct_names(paths) == ["a/run", "b/run", f"{tmp_path.name}/c.jsonl"]
    assert plotting.distinct_names(paths[1:]) == ["run", "c.jsonl"]
    (save_dir / ".hydra").mkdir()
    settings = save_dir / ".hydra" / "hydra.yaml"
    settings.write_text("hydra: {job: {config_name: variants/electra_tt}}\n")
    assert plotting.read_curves([save_dir])[0].label == "run (variants/electra_tt)"
    for text in ("hydra: {job: {config_name: 5}}", "5", "hydra: [\n", "[" * 20_000):
        settings.write_text(text)
        assert plotting.read_curves([save_dir])[0].label == "run"


@pytest.mark.parametrize(
    ("logged", "panels", "left_out"),
    [
        ([record("train", 10)], ["mlm_loss", "mixture", "recall", "auc", "learning_rate", "throughput"], []),
        (
            [{"split": "valid", "update": 5, "rtd_auc": 0.7, "wps": 9}],
            ["auc"],
            ["mlm_loss", "mixture", "rtd_recall", "lr", "wps"],
        ),
        (
            [
                {"split": "train", "update": 5, "loss": 2.0, "lr": 0.1, "wps": 9},
                {"split": "valid", "update": 5, "spearman": 58.4},
            ],
            ["loss", "spearman", "learning_rate", "throughput"],
            [],
        ),
        (
            [TRAIN | {"mws_loss": 1.0, "mlm_loss_3": 2.0}],
            ["mlm_loss", "selection_loss"],
            ["mixture", "rtd_recall", "rtd_auc", "lr", "wps"],
        ),
    ],
    ids=["pretraining", "validation alone", "fine-tuning", "one objective"],
)
def test_command_writes_a_panel_for_each_value_and_names_those_that_are_missing(
    logged, panels, left_out, tmp_path, capsys, monkeypatch
):
    """A value that only some objectives log is not reported as missing."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: Path(file).touch())
    write(tmp_path / "metrics.jsonl", *logged)
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    files = {f"{name}.{kind}" for name in ("overview", *panels) for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    *missing, last = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in missing] == left_out
    assert f"a file for each panel: {', '.join(panels)}" in last


@pytest.mark.slow
def test_pictures_are_of_a_readable_size_and_the_same_log_gives_the_same_bytes(tmp_path):
    write(tmp_path / "metrics.jsonl", {"split": "train", "update": 5, "rtd_auc": 0.7})
    for name in ("first", "second"):
        main(["plot", str(tmp_path), "--out", str(tmp_path / name)])
    first, second = ((tmp_path / name / "overview.svg").read_bytes() for name in ("first", "second"))
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")
    height, width, _ = plt.imread(tmp_path / "first" / "overview.png").shape
    assert (width > 700, height > 500) == (True, True)


def test_truncated_last_line_is_skipped_with_a_notice(save_dir, capsys):
    log = save_dir / "metrics.jsonl"
    complete = str(plotting.read_log(log))
    with log.open("a") as file:
        file.write('{"split": "train", "upd')
    assert str(plotting.read_log(log)) == complete  # as text, because nan is unequal to itself
    assert "the last line (line 5) is cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no records yet"),
        ('{"split": "train", "update": 1}\nnonsense\n{"split": "train", "update": 2}\n', "line 2"),
        ('{"split": "train", "update": 1, "lr": "text"}\n{"split": "train", "update": 2}\n', "line 1"),
        ("[1, 2]\n[3]\n", "line 1"),
        ('{"split": "train", "update": 5, "loss": 0.7, "mixture_entropy": 1.0}\n', "no value to draw"),
        ("PIPE", "is a pipe or a device"),  # which would be waited for
        ("TERABYTE", "is too large"),
        ('{"split": "train", "update": 5, "rtd_auc": 0.7}\n', "figures cannot be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, content, named):
    log, out = tmp_path / "metrics.jsonl", tmp_path / "file" / "out"
    (tmp_path / "file").touch()
    if content == "PIPE":
        os.mkfifo(log)
    else:
        log.write_text(content)
    if content == "TERABYTE":
        os.truncate(log, 1 << 40)
    assert named in error_line(capsys, main, "plot", tmp_path, "--out", out)
    assert not out.exists()
