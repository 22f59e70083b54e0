"""``amos report`` in the process: the page of small models, parsed; what is left out; mistakes."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from benchmark_summary import write_summary, write_tagging
from failures import error_line
from html_page import Page
from omegaconf import OmegaConf
from saved_models import CORPUS, UPDATES, add_settings, write_run

from amos_fairseq.cli.main import main
from amos_fairseq.probing.results import ProbeResult, write_results
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.report import page as pages
from amos_fairseq.report.curves import read_curves
from amos_fairseq.report.page import inline_svg
from amos_fairseq.report.runs import PretrainingCost, PretrainingRun, cost_of, hardware_of, stored_seconds
from amos_fairseq.report.sections import are_curriculum_setups, cost_section

EVIL = "<script>alert(1)</script>"
NAME = f"{EVIL}$\\frac$"  # mathematics that matplotlib cannot parse
RECORD = {"epoch": 0.5, "mlm_loss_1": 5.0, "mlm_loss_2": 4.0, "mlm_loss_4": 3.0, "rtd_recall": 0.25}
RECORD |= {"unigram_entropy": 4.5}
SHORT = {"tokens_per_sample": 20}
MIXTURE = {"mixture_1": 0.2, "mixture_2": 0.3, "mixture_4": 0.5}
DETECTOR = {"rtd_loss_above_prior": -0.01, "rtd_logit_std": 0.7, "rtd_state_variance": 0.2}


def write_metrics(run, **values):
    """Return the run, which is created if it is not there."""
    run.mkdir(exist_ok=True)
    records = [{"split": "train", "update": 10, **RECORD, **values, "wall": 60.0, "wps": 100.0}]
    records += [{"split": "train", "update": 20, **RECORD, **values, "wall": 3600.0, "wps": 300.0}]
    records += [{"split": "valid", "update": 20, **RECORD, **values}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def write_probing(folder, run):
    """Two seeds of one probe, with 50 and 70 % of the targets right."""
    folder.mkdir()
    results = [ProbeResult(NAME, "generator", 2, None, n, "micro_f1", f1, 9) for n, f1 in ((1, 0.5), (2, 0.7))]
    checkpoint = {"file": str(run / "checkpoint_last.pt"), "num_updates": UPDATES}
    write_results(folder, checkpoint, {"classifier": "linear"}, results)
    return folder


def report(tmp_path, *arguments):
    """Run the command; return the page and what it printed about parts that are left out."""
    out = tmp_path / "page.html"
    main(["report", *map(str, arguments), "--masked-tokens", "50", "--out", str(out)])
    return Page(out.read_text(encoding="utf-8"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text("\n".join(CORPUS), encoding="utf-8")
    return file


@pytest.mark.slow
def test_page_of_an_amos_run(tmp_path, text, capsys, monkeypatch):
    run = write_run(tmp_path / "<i>a & $run", task=SHORT)
    write_metrics(run, **MIXTURE, **DETECTOR)
    add_settings(run, "amos_tiny")
    glue = write_summary(tmp_path / "glue", UPDATES, run, **{"MNLI": 70.0, EVIL: 50.0})
    later = write_summary(tmp_path / "later", UPDATES + 1, run, MNLI=80.0)
    probe = write_probing(tmp_path / "probe", run)
    tag = write_tagging(tmp_path / "tag", UPDATES, run)
    results = ["--glue", glue, later, "--tag", tag, "--probe", probe]
    arguments = [*results, "--text", text, "--sentence", EVIL, "--sentence", CORPUS[1]]
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: read.append(str(file)) or load(file, **options))
    page = report(tmp_path, run, *arguments)
    assert read == [str(run / "checkpoint_last.pt")], "a checkpoint may have gigabytes"
    assert page.titles == [
        "Runs and their cost",
        "Fine-tuning results",
        "Score over the cost of pretraining",
        "Tagging results",
        "Loss on replaced tokens by depth",
        "Generator loss by depth",
        "Mixture weights",
        "Discriminator accuracy on replaced tokens",
        "State of the discriminator",
        "Replaced tokens by depth",
        "Edge probing by layer",
        "Recipe and departures from the paper",
    ]
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.links) <= set(page.ids)
    for name in ("Figure 1a", "Figure 1b", "Figure 5a", "Figure 5b", "Figure 6", "Table 9"):
        assert f"AMOS {name}" in page.text
    assert "<i>a & $run" in page.text
    assert "held_out.txt" in page.text
    assert "the token sampled from each depth of the generator" in page.text
    assert "learned mixture, depths 1, 2, 4" in page.text
    assert "1.00" in page.text, "hours"
    assert "80.0 ± 0.5" in page.text
    assert "60.0 ± 14.1" in page.text, "50 and 70 % of two probes"
    assert f"{NAME} 9" in page.text, "targets of a probing task"
    assert EVIL in page.text.replace("\u2019", ""), "the task's name"
    assert "left out:" not in capsys.readouterr().out
    assert "chunk (span F1)" in page.text
    figures = sorted(path.name for path in (tmp_path / "page_figures").iterdir())
    stems = ["discriminator", "generator_loss", "loss_by_depth", "mixture", "probing", "recall", "score_by_cost"]
    assert figures == [f"{stem}.{extension}" for stem in stems for extension in ("png", "svg")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "absent"),
    [("mlm", ["Loss on replaced tokens by depth", "Mixture weights"]), ("electric", ["Mixture weights"])],
)
def test_parts_that_an_objective_lacks_are_left_out(tmp_path, text, objective, absent, capsys):
    run = write_run(tmp_path / "run", objective, task=SHORT)
    write_metrics(run)
    page = report(tmp_path, run, "--text", text, "--sentence", CORPUS[1])
    printed = capsys.readouterr().out
    assert "left out: Tagging results: --tag DIR adds them" in printed
    for title in absent:
        assert title not in page.titles
        assert f"left out: {title}" in printed
    assert {"Generator loss by depth", "Replaced tokens by depth"} <= set(page.titles)


def test_runs_with_one_depth_share_a_panel_and_the_corpus_is_not_needed(tmp_path, text, capsys):
    names = {"shallow": "1", "deep": "2"}
    runs = [write_run(tmp_path / name, generator_depths=names[name], task=SHORT) for name in names]
    page = report(tmp_path, *runs, "--text", text)
    assert "shallow, depth 1" in page.text
    assert "deep, depth 2" in page.text
    assert "here the one discriminator of a run" not in page.text
    printed = capsys.readouterr().out
    assert "Replaced tokens by depth (AMOS Table 9)" in printed
    assert "give a text with --sentence" in printed
    assert "Mixture weights (AMOS Figure 5a): no run has logged it" in printed


def test_a_run_without_a_checkpoint_has_its_curves(tmp_path, capsys):
    run = write_metrics(tmp_path / "run")
    page = report(tmp_path, run)
    curves = ["Generator loss by depth", "Discriminator accuracy on replaced tokens"]
    assert page.titles == ["Runs and their cost", *curves, "Left out"]
    assert f"{run} has no checkpoint_last.pt" in capsys.readouterr().out
    assert "Pretraining of runUpdates: 20." in page.text, "the heading, then the line below it"
    assert "curriculum" not in page.text


@pytest.mark.parametrize(("deviation", "said"), [(0.009, True), (0.011, False)])
def test_a_run_that_ends_with_equal_logits_is_named(tmp_path, deviation, said):
    run = write_metrics(tmp_path / "run", rtd_logit_std=deviation)
    page = report(tmp_path, run)
    assert ("since update 10 the logits of a batch have been equal" in page.text) == said


def test_old_figures_are_removed_and_a_run_counts_once(tmp_path):
    run = write_metrics(tmp_path / "run")
    figures = tmp_path / "page_figures"
    report(tmp_path, run, "--probe", write_probing(tmp_path / "probe", run))
    (figures / "own.png").touch()
    assert (figures / "probing.svg").is_file()
    page = report(tmp_path, run, run, tmp_path / "run" / "." / "../run")
    assert sorted({file.stem for file in figures.iterdir()}) == ["generator_loss", "own", "recall"]
    assert "Pretraining of runUpdates: 20." in page.text


def test_two_outputs_of_amos_probe_have_their_names(tmp_path):
    runs = [write_metrics(tmp_path / name) for name in ("one", "two")]
    folders = [write_probing(tmp_path / f"probe_{run.name}", run) for run in runs]
    page = report(tmp_path, *runs, "--probe", *folders, folders[0])
    assert page.titles[-3:] == ["Edge probing by layer: one", "Edge probing by layer: two", "Left out"]
    assert "over 2 seeds of the micro-F1" in page.text


def test_a_last_line_that_is_no_record_is_refused_and_a_cut_one_left_out(tmp_path, capsys):
    run = write_metrics(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"split": "tr')
    report(tmp_path, run)
    assert "is cut short and left out" in capsys.readouterr().out
    (run / "metrics.jsonl").write_text(whole + "[1]\n")
    arguments = ["report", run, "--out", tmp_path / "other.html"]
    assert "not a record of metrics" in error_line(capsys, main, *arguments, reports_progress=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "absent"], "absent holds neither metrics.jsonl nor checkpoint_last.pt: give the SAVE_DIR"),
        (["RUN", "--glue", "RUN"], "holds no results: give the --out"),
        (["RUN", "--probe", "RUN"], "results.json is missing: give the directory that amos probe wrote"),
        (["RUN", "--out", "absent/page.html"], "absent does not exist: give another --out"),
        (["RUN", "--out", "RUN"], "is a folder: give the name of the page"),
        (["RUN", "--text", "absent"], "the text cannot be read (No such file"),
        (["RUN", "--text", "/dev/null"], "--text /dev/null is empty"),
        (["RUN", "--sentence", " "], "--sentence ' ' is empty"),
        (["RUN", "--out", "RUN/metrics.jsonl/page.html"], "metrics.jsonl is not a folder: give another --out"),
        (["RUN", "--masked-tokens", "0"], "--masked-tokens 0 measures nothing"),
        (["RUN", "--seed", "-1"], "--seed -1 is out of range"),
        (["RUN", "--device", "abacus"], "device abacus cannot be used"),
        (["RUN", "--device", "meta"], "device meta cannot be used"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_metrics(tmp_path / "run")
    words = [word.replace("RUN", str(run)) for word in arguments]
    assert message in error_line(capsys, main, "report", *words, reports_progress=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_page_that_cannot_be_written_keeps_the_old_one(tmp_path, capsys, monkeypatch):
    run = write_metrics(tmp_path / "run")
    report(tmp_path, run)
    before = (tmp_path / "page.html").read_bytes()
    report(tmp_path, run)
    assert (tmp_path / "page.html").read_bytes() == before, "the same bytes from the same files"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "write_text", full)
    line = error_line(capsys, main, "report", run, "--out", tmp_path / "page.html", reports_progress=True)
    assert "page.html: the page cannot be written (No space left on device); choose another place with --out" in line
    assert (tmp_path / "page.html").read_bytes() == before


def write_walls(folder, walls):
    records = [{"split": "train", "update": n} | ({"wall": wall} if wall else {}) for n, wall in enumerate(walls)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def seconds(folder, stored=None, parent=""):
    """``stored``: what the checkpoint says; None without one."""
    (curves,) = read_curves([folder])
    state = {"extra_state": {"previous_training_time": stored}}
    return cost_of(folder, curves, 1, stored_seconds(state, str(parent))).seconds


def test_time_of_a_run_in_parts(tmp_path):
    """Two processes of 100 and 50, or of 100 and 150 seconds; the log does not show the start of the last one."""
    write_walls(tmp_path, [40.0, 100.0, None, 20.0, 50.0])
    assert seconds(tmp_path) == 150
    assert cost_of(tmp_path / "absent", None).seconds is None
    write_walls(tmp_path, [40.0, 100.0, 120.0, 150.0])
    assert seconds(tmp_path, 250.0) == 250
    assert seconds(tmp_path, 90.0) == 150, "still training"
    assert seconds(tmp_path, "damaged") == 150
    parent, without_time, damaged = (tmp_path / name for name in ("parent.pt", "without_time.pt", "damaged.pt"))
    torch.save({"extra_state": {"previous_training_time": 1000.0}}, parent)
    torch.save({"extra_state": {}}, without_time)
    damaged.write_bytes(b"nothing")
    assert seconds(tmp_path, 1250.0, parent) == 250
    # A name of 300 characters gives an error of the system, as a path in a folder that may not be read.
    for unread in (tmp_path / "absent.pt", damaged, without_time, tmp_path / ("x" * 300), tmp_path / "a\0b"):
        assert seconds(tmp_path, 1250.0, unread) == 150


def test_a_run_without_a_log_says_so(tmp_path):
    """A run that was stopped before its first record, and one whose records have no throughput."""
    write_walls(tmp_path, [None])
    (curves,) = read_curves([tmp_path])
    runs = [PretrainingRun(tmp_path, name, PretrainingCost(3), each) for name, each in (("new", None), ("old", curves))]
    (table,) = cost_section(runs).tables
    shown = {row[0]: row[1:] for row in table.rows}
    without = "no metrics.jsonl, which a run writes from update common.log_interval on"
    assert shown["hours"] == shown["tokens per second, median"] == [without, "not in the run's files"]


def amos_run(setup, criterion="amos", **settings):
    model = {"generator_depths": "4,6,8", "encoder_layers": 12, "encoder_embed_dim": 768} | settings
    cfg = OmegaConf.create({"criterion": {"_name": criterion}, "model": model})
    return PretrainingRun(Path("run"), "run", PretrainingCost(1), cfg=cfg, setup=setup)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"criterion": "electra"}, False),
        ({"generator_depths": "2,4"}, False),
        ({"encoder_embed_dim": 256}, False),
        ({"setup": "learned mixture, depths 4, 6, 8"}, False),  # two runs of the same
    ],
)
def test_curriculum_setups_are_ways_to_mix_the_depths_of_one_model(changes, expected):
    runs = [
        amos_run("learned mixture, depths 4, 6, 8"),
        amos_run(**{"setup": "layer switch, depths 4, 6, 8"} | changes),
    ]
    assert are_curriculum_setups(runs) == expected
    assert not are_curriculum_setups(runs[:1])
    assert not are_curriculum_setups([*runs, PretrainingRun(Path("flags"), "flags", PretrainingCost(1))])


def test_precision_is_that_of_the_trainer(tmp_path):
    """A run on several ranks of unlike hardware, or a resumed one, may have another than its recipe asks for."""
    runs = [PretrainingRun(tmp_path, "run", PretrainingCost(3))]
    for common in ({"bf16": True, "fp16": False}, {"fp16": True}, {"amp": True}, {"bf16": False}):
        cfg = compose_recipe("mlm_tiny", ["task.data=DATA", "distributed_training.distributed_world_size=1"])
        cfg.common.update(common)
        runs.append(PretrainingRun(tmp_path, "run", PretrainingCost(3), cfg=cfg))
    (table,) = cost_section(runs).tables
    (row,) = [row for row in table.rows if row[0] == "precision"]
    assert row[2:] == ["bf16", "fp16", "amp", "float32"]
    assert row[1] not in row[2:]


def test_gpus_of_the_log(tmp_path):
    line = "[x] - rank   {}: capabilities =  8.0  ; total memory = 39.586 GB ; name = NVIDIA A100-SXM4-40GB      \n"
    (tmp_path / "hydra_train.log").write_text("start\n" + 2 * (line.format(0) + line.format(1)))
    assert hardware_of(tmp_path) == "2 x NVIDIA A100-SXM4-40GB"
    assert hardware_of(tmp_path / "absent") is None
    (tmp_path / "hydra_train.log").unlink()
    os.mkfifo(tmp_path / "hydra_train.log")
    assert hardware_of(tmp_path) is None


def test_ids_of_a_figure_are_its_own():
    svg = (
        '<?xml version="1.0"?><svg width="10pt" height="5pt" viewBox="0 0 10 5"><metadata>m</metadata><g id="a"/>'
        '<use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    found = inline_svg(svg, "x", "A & B")
    assert found.startswith('<svg viewBox="0 0 10 5" width="14" role="img" aria-label="A &amp; B">')
    assert found.endswith('<g id="x-a"/><use xlink:href="#x-a" clip-path="url(#x-a)"/></svg>')
    assert not re.search("metadata|xml version", found)
