"""``amos report`` in the process: the numbers and sections of the page, what is left out, mistakes."""

import base64
import json
import re

import pytest
import torch
from benchmark_summary import write_summary, write_tagging
from failures import error_line
from html_page import text_of
from saved_models import CORPUS, UPDATES, add_settings, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.flops.configuration import read_configuration, training_flops
from amos_fairseq.probing.results import ProbeResult, ProbeResults
from amos_fairseq.report.replaced_tokens import held_out_blocks, replaced_token_losses
from amos_fairseq.report.runs import PretrainingRun, add_log, stored_seconds
from amos_fairseq.report.sections import flops_in_words

EVIL = "<script>alert(1)</script>"
NAME = f"{EVIL}$\\frac$"  # mathematics that matplotlib cannot parse
RECORD = {"epoch": 0.5, "mlm_loss_1": 5.0, "mlm_loss_2": 4.0, "mlm_loss_4": 3.0, "rtd_recall": 0.25}
RECORD |= {"unigram_entropy": 4.5}
SHORT = {"tokens_per_sample": 20}
AMOS_RECORD = {"mixture_1": 0.2, "mixture_2": 0.3, "mixture_4": 0.5, "rtd_loss_above_prior": -0.01}
AMOS_RECORD |= {"rtd_logit_std": 0.7, "rtd_state_variance": 0.2}


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
    checkpoint = {"file": str(run / "checkpoint_last.pt"), "model": "AmosModel", "num_updates": UPDATES}
    ProbeResults(checkpoint, {"classifier": "linear"}, [], results).write(folder)
    return folder


class Report:
    """The page that the command wrote: its text, headings, and the cells of each row of its tables."""

    def __init__(self, tmp_path, *arguments):
        out = tmp_path / "page.html"
        main(["report", *map(str, arguments), "--out", str(out)])
        self.page = out.read_text(encoding="utf-8")
        self.text = text_of(self.page)
        self.titles = [text_of(title).strip() for title in re.findall(r"<h2>(.*?) <span", self.page)]
        rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", self.page)
        self.rows = {text_of(name): list(map(text_of, re.findall("<td>(.*?)</td>", cells))) for name, cells in rows}
        self.figures = sorted(path.name for path in (tmp_path / "page_figures").iterdir())


@pytest.fixture(autouse=True)
def few_masked_tokens(monkeypatch):
    monkeypatch.setattr("amos_fairseq.report.runs.MASKED_TOKENS", 50)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text("\n".join(CORPUS), encoding="utf-8")
    return file


@pytest.mark.slow
def test_page_of_an_amos_run(tmp_path, text, capsys, monkeypatch):
    """With results of every kind, and names that are HTML and mathematics."""
    run = write_run(tmp_path / "<i>a & $run", task=SHORT)
    write_metrics(run, **AMOS_RECORD)
    add_settings(run, "amos_tiny")
    glue = write_summary(tmp_path / "glue", UPDATES, run, **{"MNLI": 70.0, EVIL: 50.0})
    later = write_summary(tmp_path / "later", UPDATES + 1, run, MNLI=80.0)
    probe = write_probing(tmp_path / "probe", run)
    tag = write_tagging(tmp_path / "tag", UPDATES, run)
    results = ["--glue", glue, later, "--tag", tag, "--probe", probe]
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: read.append(str(file)) or load(file, **options))
    report = Report(tmp_path, run, *results, "--text", text, "--sentence", EVIL, "--sentence", CORPUS[1])
    assert read == [str(run / "checkpoint_last.pt")], "a checkpoint may have gigabytes"
    assert len(report.titles) == 11
    assert "left out:" not in capsys.readouterr().out
    assert "Pretraining of <i>a & $run" in report.text
    assert report.text.count(EVIL) == 3, "the column of a task; a probe in a caption and in a row"
    stems = ["discriminator", "generator_loss", "loss_by_depth", "mixture", "probing", "recall", "score_by_cost"]
    assert report.figures == [f"{stem}.{extension}" for stem in stems for extension in ("png", "svg")]
    images = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', report.page)
    svgs = {path.read_bytes() for path in (tmp_path / "page_figures").glob("*.svg")}
    assert set(map(base64.b64decode, images)) == svgs

    cfg, vocabulary_size = read_configuration(str(run))
    flops = training_flops(cfg, vocabulary_size)
    assert report.rows["replaced tokens from"] == ["learned mixture, depths 1, 2, 4"]
    assert report.rows["updates"] == ["20"]
    assert report.rows["tokens"] == [f"{20 * flops.tokens_per_update:,} ({flops.tokens_per_update:,} an update)"]
    assert report.rows["FLOPs"] == [flops_in_words(20, flops.per_update)]
    assert (report.rows["hours"], report.rows["tokens per second, median"]) == (["1.00"], ["200"])
    of_tagging = report.rows["<i>a & $run, 7 updates"]  # the last table with this row
    assert of_tagging == ["81.0 ± 1.4", "62.0 ± 2.8"]
    assert report.rows["<i>a & $run, 8 updates"] == ["80.0 ± 0.5", "81.0 ± 0.5", "-"]
    assert report.rows[NAME] == ["60.0 ± 14.1"], "50 and 70 % of two probes"
    loaded = load_checkpoint(run)
    losses = replaced_token_losses(loaded, held_out_blocks(loaded, text.read_text()), seed=1, num_masked=50)
    for of_depth in losses:
        row = report.rows[f"<i>a & $run, depth {of_depth.depth}"]
        assert row[0] == str(len(of_depth.losses))
        assert (row[2], row[4]) == (f"{of_depth.losses.mean():.3f}", f"{100 * of_depth.recall:.1f}")


def test_flops_of_a_run_with_a_budget_of_time(tmp_path, text) -> None:
    """Its settings have no number of updates."""
    run = write_metrics(write_run(tmp_path / "run", task=SHORT))
    add_settings(run, "amos_tiny")
    per_update = training_flops(*read_configuration(str(run))).per_update
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["optimization"]["max_update"] = 0
    torch.save(state, run / "checkpoint_last.pt")
    report = Report(tmp_path, run, "--text", text)
    assert report.rows["FLOPs"] == [flops_in_words(20, per_update)]


@pytest.mark.slow
def test_a_page_about_mlm_speaks_of_no_generator_and_no_replaced_tokens(tmp_path, text, capsys):
    run = write_metrics(write_run(tmp_path / "run", "mlm", task=SHORT))
    add_settings(run, "mlm_tiny")
    report = Report(tmp_path, run, "--text", text, "--sentence", CORPUS[1])
    assert report.titles == ["Runs and their cost", "MLM loss", "Predictions of masked tokens"]
    printed = capsys.readouterr().out
    assert "left out: Tagging results" in printed
    words = re.findall("(?i)replaced|generator|discriminator|detection|mixture", report.text + printed)
    assert words == []


def test_runs_without_a_checkpoint_have_their_curves_and_count_once(tmp_path, capsys):
    """Two of them, with a probe each; then one, whose page has no figure of the probes any more."""
    runs = [write_metrics(tmp_path / "one", rtd_logit_std=0.009), write_metrics(tmp_path / "two", rtd_logit_std=0.011)]
    probes = [write_probing(tmp_path / f"probe_{run.name}", run) for run in runs]
    report = Report(tmp_path, *runs, tmp_path / "one" / "." / "../one", "--probe", *probes, probes[0])
    curves = ["Generator loss by depth", "Discriminator accuracy on replaced tokens", "State of the discriminator"]
    probed = [f"Edge probing by layer: {name}" for name in ("one", "two")]
    assert report.titles == ["Runs and their cost", *curves, *probed]
    assert f"{runs[0]} has no checkpoint_last.pt" in capsys.readouterr().out
    assert report.rows["updates"] == ["20", "20"]
    assert "one: since update 10 the logits of a batch have been equal" in report.text
    assert "two: since update" not in report.text
    (tmp_path / "page_figures" / "of_the_user.png").touch()
    report = Report(tmp_path, runs[0])
    assert Report(tmp_path, runs[0]).page == report.page, "the same bytes from the same files"
    stems = {name.partition(".")[0] for name in report.figures}
    assert stems == {"discriminator", "generator_loss", "of_the_user", "recall"}


def test_scores_over_hours(tmp_path, capsys):
    """20 updates took an hour; where no task has scores of two checkpoints there is no curve, and a line says so."""
    run = write_metrics(tmp_path / "run")
    scores = ["--glue", write_summary(tmp_path / "early", 10, run, RTE=50.0), "--over", "hours"]
    page = Report(tmp_path, run, *scores, "--tag", write_tagging(tmp_path / "tag", 20, run))
    line = "--over hours has no effect: no run has two checkpoints with scores of one task; it needs results of two"
    assert line in page.text
    assert line in capsys.readouterr().out
    page = Report(tmp_path, run, *scores, "--glue", write_summary(tmp_path / "late", 20, run, RTE=60.0))
    assert "The horizontal axis counts hours of pretraining" in page.text


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "run")
    for arguments, named in (
        ([tmp_path.parent], f"{tmp_path.parent} holds neither metrics.jsonl nor checkpoint_last.pt"),
        (["--probe", "run"], "results.json"),
        (["--out", "absent/page.html"], "absent does not exist"),
        (["--out", "run"], "is a folder"),
        (["--text", "absent"], "absent is missing: give a text in UTF-8"),
        (["--sentence", " "], "--sentence ' '"),
        (["--device", "abacus"], "device abacus"),
    ):
        assert named in error_line(capsys, main, "report", "run", *arguments, reports_progress=True), arguments
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_time_of_a_run_in_parts(tmp_path):
    """Two processes of 100 and 50 seconds; a checkpoint with its own time."""
    walls = [{"wall": 40.0}, {"wall": 100.0}, {}, {"wall": 20.0}, {"wall": 50.0}]
    records = [json.dumps({"split": "train", "update": n} | wall) + "\n" for n, wall in enumerate(walls)]
    (tmp_path / "metrics.jsonl").write_text("".join(records))
    add_log(run := PretrainingRun(tmp_path, "run"))
    assert run.seconds == 150
    assert stored_seconds({"extra_state": {"previous_training_time": 1250.0}}) == 1250
    assert stored_seconds({"extra_state": {"previous_training_time": "damaged"}}) == stored_seconds({}) == 0
