"""``amos report`` in the process: the numbers and sections of the page, its figures, mistakes."""

import base64
import html
import json
import re
from dataclasses import asdict

import pytest
import torch
from benchmark_summary import write_summary, write_tagging
from failures import error_line
from saved_models import CORPUS, TEXT, UPDATES, add_settings, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.experiments.records import write_record
from amos_fairseq.flops import read_configuration, training_flops
from amos_fairseq.probing.probe import ProbeResult, ProbeResults
from amos_fairseq.report.inspection import held_out_blocks, inspect_text, replaced_token_losses

EVIL = "<script>alert(1)</script>"
NAME = f"{EVIL}$\\frac$"  # mathematics that matplotlib cannot parse
RECORD = {"epoch": 0.5, "mlm_loss_1": 5.0, "mlm_loss_2": 4.0, "mlm_loss_4": 3.0, "rtd_recall": 0.25}
RECORD |= {"unigram_entropy": 4.5}
SHORT = {"tokens_per_sample": 20}
AMOS_RECORD = {"mixture_1": 0.2, "mixture_2": 0.3, "mixture_4": 0.5, "rtd_logit_std": 0.7, "lr": 0.1}

TEXT_TAGS = {"h1", "h2", "h3", "p", "nav", "ul", "li", "a", "span", "b", "sup", "br", "section", "div"}
TABLE_TAGS = {"table", "thead", "tbody", "tr", "th", "td"}
TAGS = {"html", "head", "meta", "title", "body", "figure", "img", "figcaption", *TEXT_TAGS, *TABLE_TAGS}


def text_of(page: str) -> str:
    """Check that a page is one file without scripts and network access; return its text without the style."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert set(re.findall(r"<([a-z]\w*)", page)) <= TAGS
    assert not re.search(r"https?:|url\(|@import|srcset|<[^>]*\son\w+=", page)
    for target in re.findall(r'(?:href|src)="([^"]*)"', page):
        assert target.startswith(("#", "data:image/svg+xml;base64,"))
        assert not target.startswith("#") or f'id="{target[1:]}"' in page
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def write_metrics(run, **values):
    """Return the run, which is created if it is not there."""
    run.mkdir(exist_ok=True)
    records = [{"split": "train", "update": 10, **RECORD, **values, "wps": 100.0}]
    records += [{"split": "train", "update": 20, **RECORD, **values, "wps": 300.0}]
    records += [{"split": "valid", "update": 20, **RECORD, **values}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def write_probing(folder, run):
    """Two seeds of one probe, with 50 and 70 % of the targets right."""
    folder.mkdir()
    results = [ProbeResult(NAME, "generator 2", n, f1, 9) for n, f1 in ((1, 0.5), (2, 0.7))]
    checkpoint = {"file": str(run / "checkpoint_last.pt"), "model": "AmosModel", "num_updates": UPDATES}
    content = ProbeResults(checkpoint, {"classifier": "linear"}, [], results)
    write_record(folder / "results.json", asdict(content))
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


@pytest.fixture(autouse=True)
def few_masked_tokens(monkeypatch):
    monkeypatch.setattr("amos_fairseq.report.runs.MASKED_TOKENS", 50)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text("\n".join(CORPUS), encoding="utf-8")
    return file


@pytest.mark.slow
def test_page_of_an_amos_run(tmp_path, text, monkeypatch):
    """With results of every kind, and names that are HTML and mathematics."""
    run = write_run(tmp_path / "<i>a & $run", task=SHORT)
    write_metrics(run, **AMOS_RECORD)
    add_settings(run, "amos_tiny")
    glue = write_summary(tmp_path / "glue", UPDATES, run, **{"MNLI": 70.0, EVIL: 50.0})
    random = write_summary(tmp_path / "random", UPDATES, run, from_scratch=True, MNLI=35.0)
    results = [glue, random, write_tagging(tmp_path / "tag", UPDATES, run), write_probing(tmp_path / "probe", run)]
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: read.append(str(file)) or load(file, **options))
    figures = tmp_path / "figures"
    options = ["--text", text, "--sentence", EVIL, "--sentence", CORPUS[1], "--figures", figures]
    report = Report(tmp_path, run, *results, *options)
    assert read == [str(run / "checkpoint_last.pt")], "a checkpoint may have gigabytes"
    assert report.titles == [
        *("Runs and their cost", "Fine-tuning results", "Training curves", "Loss on replaced tokens by depth"),
        *("Tokens of a text", "Edge probing by layer"),
    ]
    assert "Report of <i>a & $run" in report.text
    drawn = ["overview", "loss_by_depth"]
    stems = [*drawn, "mlm_loss", "mixture", "recall", "logit_std", "learning_rate", "throughput"]
    files = {f"{stem}.{extension}" for stem in stems for extension in ("png", "svg")}
    assert {path.name for path in figures.iterdir()} == files
    images = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', report.page)
    assert [base64.b64decode(image) for image in images] == [(figures / f"{n}.svg").read_bytes() for n in drawn]

    flops = training_flops(*read_configuration(str(run)))
    assert report.rows["replaced tokens from"] == ["learned mixture, depths 1, 2, 4"]
    assert report.rows["updates"] == ["20"]
    assert report.rows["tokens"] == [f"{20 * flops.tokens_per_update:,} ({flops.tokens_per_update:,} an update)"]
    assert report.rows["FLOPs"] == [f"{20 * flops.per_update:.2e}"]
    assert report.rows["tokens per second, median"] == ["200"]
    assert report.rows["glue (<i>a & $run, 7 updates)"] == ["70.0 ± 0.5", "50.0 ± 0.5"]
    assert report.rows["random (<i>a & $run, random weights)"] == ["35.0 ± 0.5", "-"]
    assert report.rows["tag (<i>a & $run, 7 updates)"] == ["81.0 ± 1.4", "62.0 ± 2.8"]
    assert report.rows["generator 2"] == ["60.0 ± 14.1"], "50 and 70 % of two probes"
    losses = replaced_token_losses(load_checkpoint(run), held_out_blocks(load_checkpoint(run), text.read_text()), 1, 50)
    for of_depth in losses:
        row = report.rows[f"<i>a & $run, depth {of_depth.depth}"]
        assert row[0] == str(len(of_depth.losses))
        assert (row[2], row[4]) == (f"{of_depth.losses.mean():.3f}", f"{100 * of_depth.recall:.1f}")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["amos", "teams", "electric", "mlm"])
def test_every_value_of_a_text_is_on_the_page(objective, tmp_path, text):
    """The text has a script and special tokens, which must be shown and not run. A page about MLM speaks of no generator."""
    run = write_metrics(write_run(tmp_path / "run", objective, task=SHORT))
    add_settings(run, f"{objective}_tiny")
    report = Report(tmp_path, run, "--text", text, "--sentence", TEXT)
    assert "<s>" in report.text
    inspection = inspect_text(load_checkpoint(run), TEXT, seed=1)
    assert inspection.summary in report.text
    for masked in inspection.masked:
        (row,) = re.findall(rf"(?s)<td>{masked.position}</td>.*?</tr>", report.page)
        for prediction in (prediction for predictions in masked.predictions for prediction in predictions):
            assert f"{prediction.probability:.1%} {prediction.text}" in text_of(row)
    if objective == "mlm":
        assert report.titles == ["Runs and their cost", "Training curves", "Tokens of a text"]
        words = re.findall("(?i)generator|discriminator|detection", report.text)
        assert words == []


def test_runs_without_a_checkpoint_have_their_curves(tmp_path):
    """Two of them, with a probe each; then one, whose page is the same when it is written again."""
    runs = [write_metrics(tmp_path / name) for name in ("one", "two")]
    probes = [write_probing(tmp_path / f"probe_{run.name}", run) for run in runs]
    report = Report(tmp_path, *runs, tmp_path / "one" / ".", *probes, probes[0])
    assert report.titles == ["Runs and their cost", "Training curves", "Edge probing by layer"]
    assert re.findall(r"<h3>Edge probing of (\w+) \(AmosModel\) after", report.page) == ["one", "two"]
    assert f"{runs[0]} has no checkpoint_last.pt" in report.text
    assert report.rows["updates"] == ["20", "20"]
    assert (
        "two: on the validation text the MLM loss is 1.50 nats below the unigram entropy (the model uses context).\n"
        in (report.text)
    )
    write_metrics(runs[0], **dict.fromkeys(("mlm_loss_1", "mlm_loss_2", "mlm_loss_4"), 4.6), rtd_auc=0.52)
    report = Report(tmp_path, runs[0])
    assert (
        "0.10 nats above the unigram entropy (the model does not yet use context) and the AUC of detection is 0.52 (not "
        "clearly above chance, 0.50)."
    ) in report.text
    assert Report(tmp_path, runs[0]).page == report.page, "the same bytes from the same files"


def test_a_page_of_results_alone(tmp_path):
    report = Report(
        tmp_path, write_summary(tmp_path / "own", 0, tmp_path / "mine", benchmark="classification", own=80.0)
    )
    assert report.titles == ["Fine-tuning results"]
    assert report.rows["own (mine, as imported)"] == ["80.0 ± 0.5"]
    assert "own (mine, as imported): a note" in report.text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["empty"],
            "empty is no SAVE_DIR with metrics.jsonl or checkpoint_last.pt, and no OUT of fine-tuning or amos probe",
        ),
        (["run", "--out", "absent/page.html"], "give the name of a page in a folder that exists"),
        (["run", "--out", "run"], "give the name of a page in a folder that exists"),
        (["run", "--text", "absent"], "absent is missing: give a text in UTF-8"),
        (["run", "--device", "abacus"], "device abacus"),
        (["run", "--figures", "run/metrics.jsonl"], "the page or its figures cannot be written"),
    ],
)
def test_mistakes_are_one_line(arguments, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert named in error_line(capsys, main, "report", *arguments, reports_progress=True)
