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
from amos_fairseq.errors import UserError
from amos_fairseq.report import curves as plotting
from amos_fairseq.run.metrics_file import read_records


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


def test_title_names_run_and_recipe(save_dir, tmp_path):
    """Hydra stores the name of the YAML beside the metrics; a run with flags, or a broken file, has none."""
    (run,) = plotting.read_curves([save_dir])
    (save_dir / ".hydra").mkdir()
    (save_dir / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    config_name: variants/electra_tt\n")
    (named,) = plotting.read_curves([save_dir])
    for text in ("hydra: 5", "hydra: {job: {config_name: 5}}", "hydra: {job: 5}", "5", "hydra: [\n", "[" * 20_000):
        (save_dir / ".hydra" / "hydra.yaml").write_text(text)
        (broken,) = plotting.read_curves([save_dir])
        assert broken.recipe == ""
    assert [each.label for each in (run, named, broken)] == ["run", "run (variants/electra_tt)", "run"]
    figure = plotting.panels_figure([plotting.PANELS[0]], [named])
    assert figure.get_suptitle().strip() == "run (variants/electra_tt)"


def test_runs_are_named_by_what_differs(tmp_path):
    paths = [tmp_path / name for name in ("a/run", "b/run", "c.jsonl")]
    assert plotting.distinct_names(paths) == ["a/run", "b/run", f"{tmp_path.name}/c.jsonl"]
    assert plotting.distinct_names(paths[1:]) == ["run", "c.jsonl"]


@pytest.fixture
def empty_figures(monkeypatch):
    """Write empty files instead of figures."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: Path(file).touch())


@pytest.mark.usefixtures("empty_figures")
def test_command_names_its_figures_in_one_line(save_dir, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert main(["plot", str(save_dir), "--out", str(out)]) == 0
    names = ["overview", *(panel.file_name for panel in (*plotting.PANELS, *plotting.SCHEDULE_PANELS))]
    assert {path.name for path in out.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert capsys.readouterr().out == (
        f"{out / 'overview.png'}: all panels; in the same folder, a file for each panel: {', '.join(names[1:])} "
        "(.png and .svg)\n"
    )


def test_figures_and_notices_of_missing_values(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    write(log, {"split": "valid", "update": 5, "rtd_auc": 0.7})
    assert main(["plot", str(log), "--out", str(tmp_path)]) == 0
    assert "MLM loss per generator depth: left out, no run logged mlm_loss\n" in capsys.readouterr().out
    assert not (tmp_path / "mlm_loss.png").exists()
    assert (tmp_path / "auc.png").exists()
    height, width, _ = plt.imread(tmp_path / "overview.png").shape
    assert width > 700
    assert height > 500
    assert ElementTree.parse(tmp_path / "overview.svg").getroot().tag.endswith("svg")


@pytest.mark.usefixtures("empty_figures")
def test_throughput_of_validation_alone_is_no_panel(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    write(log, {"split": "valid", "update": 5, "rtd_auc": 0.7, "wps": 9})
    assert main(["plot", str(log), "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "throughput.png").exists()


@pytest.mark.usefixtures("empty_figures")
def test_panels_of_a_fine_tuning_run(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    training = {"split": "train", "update": 5, "loss": 2.0, "lr": 0.1, "wps": 9}
    write(log, training, {"split": "valid", "update": 5, "loss": 2.5, "spearman": 58.4})
    assert main(["plot", str(log), "--out", str(tmp_path / "out")]) == 0
    written = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert written == {"overview", "loss", "spearman", "learning_rate", "throughput"}
    assert "left out" not in capsys.readouterr().out
    lines = plotted(plotting.read_curves([log]), "spearman").get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[58.4]]


@pytest.mark.usefixtures("empty_figures")
def test_panels_of_one_objective_have_only_its_runs(save_dir, tmp_path, capsys):
    """TEAMS beside AMOS: only one run has the curve of the selection, and it is not reported as missing."""
    other = tmp_path / "teams.jsonl"
    write(other, *(record("train", update, depths=(3,), mws_loss=update / 10, mws_acc=0.5) for update in (10, 20)))
    assert main(["plot", str(save_dir), str(other), "--out", str(tmp_path / "out")]) == 0
    written = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert written > {"overview", "selection_loss", "selection_accuracy", *(p.file_name for p in plotting.PANELS)}
    assert "left out" not in capsys.readouterr().out
    (line,) = plotted(plotting.read_curves([save_dir, other]), "mws_loss").get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([10, 20], [1.0, 2.0])


def test_every_key_of_a_criterion_has_a_panel():
    """Keys as the criterions name them for the log."""
    plotted_keys = {panel.key for panel in plotting.OBJECTIVE_PANELS}
    assert set(ElectraCriterion.COUNTED_BY) - {"replaced"} <= plotted_keys
    assert {"mws_loss", "mws_acc"} <= plotted_keys


@pytest.mark.slow
def test_same_log_gives_the_same_picture_bytes(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"split": "train", "update": 5, "rtd_auc": 0.7}\n')
    for name in ("first", "second"):
        main(["plot", str(log), "--out", str(tmp_path / name)])
    assert (tmp_path / "first" / "auc.svg").read_bytes() == (tmp_path / "second" / "auc.svg").read_bytes()


def test_truncated_last_line_is_skipped_with_a_notice(save_dir, capsys):
    log = save_dir / "metrics.jsonl"
    complete = str(plotting.read_log(log))
    with log.open("a") as file:
        file.write('{"split": "train", "upd')
    assert str(plotting.read_log(log)) == complete  # as text, because nan is unequal to itself
    assert capsys.readouterr().out.startswith(f"{log}: the last line (line 5) is cut short and left out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"metrics\.jsonl: no records yet"),
        ('{"split": "train", "update": 1}\nnonsense\n{"split": "train", "update": 2}\n', r"line 2: .*\('nonsense'\)"),
        ('{"split": "train", "update": 1, "lr": "text"}\n{"split": "train", "update": 2}\n', r"line 1: not a record"),
        ("[1, 2]\n[3]\n", r"line 1: not a record"),
    ],
)
def test_bad_logs_are_refused(tmp_path, content, message):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        plotting.read_curves([tmp_path])


def test_what_is_no_log_is_refused(tmp_path):
    """A pipe would be waited for; a file of a terabyte does not fit into memory."""
    log = tmp_path / "metrics.jsonl"
    os.mkfifo(log)
    with pytest.raises(UserError, match=r"metrics\.jsonl is a pipe or a device, not a file: name a SAVE_DIR"):
        plotting.read_curves([tmp_path])
    log.unlink()
    log.touch()
    os.truncate(log, 1 << 40)
    for read in (plotting.read_curves, lambda paths: read_records(Path(paths[0]))):
        with pytest.raises(UserError, match=r"metrics\.jsonl is too large"):
            read([str(tmp_path)])


def test_log_without_a_value_to_draw_is_one_line(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"split": "train", "update": 5, "loss": 0.7, "mixture_entropy": 1.0}\n')
    line = error_line(capsys, main, "plot", tmp_path, "--out", tmp_path / "pictures")
    assert f"{tmp_path.name}: no value to draw, records hold none of mlm_loss_N, mixture_N, rtd_recall, rtd_auc" in line
    assert not (tmp_path / "pictures").exists()


def test_directory_that_cannot_be_made_is_one_line(save_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    line = error_line(capsys, main, "plot", save_dir, "--out", tmp_path / "file" / "out")
    assert "figures cannot be written (Not a directory); choose another directory with --out" in line
