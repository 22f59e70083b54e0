"""``amos plot`` of training curves against the given records, and errors."""

import json
import math
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from failures import error_line
from matplotlib.figure import Figure

from amos_fairseq.cli.main import main
from amos_fairseq.report import curves as plotting


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


def test_curves_hold_the_records(save_dir):
    curves = plotting.read_log(save_dir / "metrics.jsonl")
    assert curves["train"]["mlm_loss_1"].updates == [10, 20, 30]
    assert curves["train"]["mlm_loss_1"].values == pytest.approx([3.9, 3.8, 3.7])
    assert math.isnan(curves["train"]["mlm_loss_2"].values[1])
    assert curves["valid"]["rtd_auc"].values == [0.6]
    assert "lr" not in curves["valid"]
    with (save_dir / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "upd')  # the run is writing
    assert str(plotting.read_log(save_dir / "metrics.jsonl")) == str(curves)  # as text: nan is unequal to itself


def test_one_of_several_validation_subsets_is_drawn(tmp_path, capsys):
    write(tmp_path / "log.jsonl", record("valid", 10), record("test", 10, rtd_auc=0.9), record("valid", 20))
    curves = plotting.read_log(tmp_path / "log.jsonl")
    assert (curves["valid"]["rtd_auc"].updates, curves["valid"]["rtd_auc"].values) == ([10, 20], [0.6, 0.6])
    assert "of the validation subsets valid is drawn; left out: test" in capsys.readouterr().out


def test_unigram_entropy_is_a_line_for_each_text(save_dir, tmp_path):
    """The last one that validation logged; runs on the same text share it, one without it has none."""
    others = []
    for name, entropies in {"same": (5.0, 6.125), "another": (5.5,), "without": (None,)}.items():
        others.append(tmp_path / f"{name}.jsonl")
        values = [{} if entropy is None else {"unigram_entropy": entropy} for entropy in entropies]
        write(others[-1], *(record("valid", 10, **value) for value in values))
    with (save_dir / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(record("valid", 40, unigram_entropy=6.125)) + "\n")
    panel = next(panel for panel in plotting.PANELS if panel.key == "mlm_loss_")
    _, ax = plt.subplots()
    plotting.draw_panel(ax, panel, plotting.read_curves([save_dir, *others]))
    plt.close()
    levels = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert levels[-2:] == [5.5, 6.125]
    assert [text.get_text() for text in ax.texts] == [f"{plotting.UNIGRAM[1]} {value}" for value in ("5.50", "6.12")]


def test_runs_are_named_by_what_differs(tmp_path):
    paths = [tmp_path / name for name in ("a/run", "b/run", "c.jsonl")]
    assert plotting.distinct_names(paths) == ["a/run", "b/run", f"{tmp_path.name}/c.jsonl"]
    assert plotting.distinct_names(paths[1:]) == ["run", "c.jsonl"]
    assert plotting.distinct_names(paths[:2]) == ["a", "b"]
    assert plotting.distinct_names([*paths[:1], "/other/a/run"]) == [tmp_path.name, "other"]
    assert plotting.distinct_names(paths[:1]) == ["a"]
    assert plotting.distinct_names([]) == []


FINE_TUNING = [{"split": "train", "update": 5, "loss": 2.0, "lr": 0.1, "wps": 9}]
FINE_TUNING += [{"split": "valid", "update": 5, "spearman": 58.4}]
TEAMS = [{"split": "train", "update": 5, "mws_loss": 1.0, "mlm_loss_3": 2.0}]
LOGGED = [
    ([record("train", 10)], ["mlm_loss", "mixture", "recall", "auc", "learning_rate", "throughput"], []),
    (TEAMS, ["mlm_loss", "selection_loss"], ["mixture", "rtd_recall", "rtd_auc", "lr", "wps"]),
    (FINE_TUNING, ["loss", "spearman", "learning_rate", "throughput"], []),
]


@pytest.mark.parametrize(("logged", "panels", "left_out"), LOGGED, ids=["pretraining", "teams", "fine-tuning"])
def test_a_panel_for_each_value_and_a_line_for_the_missing(logged, panels, left_out, tmp_path, capsys, monkeypatch):
    """A value that only some objectives log is not reported as missing."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: Path(file).touch())
    write(tmp_path / "metrics.jsonl", *logged)
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    files = {f"{name}.{suffix}" for name in ("overview", *panels) for suffix in ("png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    missing = capsys.readouterr().out.splitlines()[:-1]
    assert [line.rpartition(" ")[2] for line in missing] == left_out


def test_mistakes_are_one_line(tmp_path, capsys):
    log, out = tmp_path / "metrics.jsonl", tmp_path / "file" / "out"
    (tmp_path / "file").touch()
    for content, named in (
        ("", "no records yet"),
        ('{"split": "train", "update": 1}\nnonsense\n{"split": "train", "update": 2}\n', "line 2"),
        ('{"split": "train", "update": 9}\n{"split": "valid", "update": 8}\n', "update 8 comes after update 9"),
        ('{"split": "train", "update": 5, "loss": 0.7, "mixture_entropy": 1.0}\n', "no value to draw"),
        ('{"split": "train", "update": 5, "rtd_auc": 0.7}\n', "figures cannot be written"),
    ):
        log.write_text(content)
        assert named in error_line(capsys, main, "plot", tmp_path, "--out", out)
    os.truncate(log, 1 << 40)
    assert "is too large" in error_line(capsys, main, "plot", tmp_path, "--out", out)
    log.unlink()
    os.mkfifo(log)  # which would be waited for
    assert "is a pipe or a device" in error_line(capsys, main, "plot", tmp_path, "--out", out)
    assert not out.exists()
