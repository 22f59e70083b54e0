"""The archive for the leaderboard on synthetic test sets: predictions, rows, filled files."""

import threading
import zipfile

import pytest

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.classification.command import read_glue_data
from amos_fairseq.downstream.classification.glue.table import write_submission
from amos_fairseq.downstream.results import read_results, summarize
from amos_fairseq.errors import UserError


@pytest.mark.slow
def test_archive_of_the_leaderboard(data, tmp_path, glue):
    outcome = glue(tmp_path, "CoLA", "STS-B", "MNLI", "RTE", with_test=True, seeds=2)
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    official = {"SST-2": 1821, "MRPC": 1725, "QNLI": 5463, "QQP": 390965, "RTE": 3000, "WNLI": 146}
    official |= {"CoLA": 1063, "STS-B": 1379, "MNLI-m": 9796, "MNLI-mm": 9847, "AX": 1104}
    predicted = {"CoLA": 7, "STS-B": 5, "MNLI-m": 6, "MNLI-mm": 4, "AX": 3}
    assert {name: len(lines) - 1 for name, lines in files.items()} == {f"{n}.tsv": rows for n, rows in official.items()}
    assert {lines[0] for lines in files.values()} == {"index\tprediction"}
    assert [line.split("\t")[0] for line in files["MNLI-mm.tsv"][1:]] == list(map(str, range(9847)))
    # RTE was run, but no test file was prepared; SST-2 was not run at all.
    assert {notice.split(" rows")[0] for notice in outcome.notices} == {
        f"{name}.tsv: {rows - predicted.get(name, 0):,} of {rows:,}" for name, rows in official.items()
    }
    assert {line.split("\t")[1] for line in files["RTE.tsv"][1:]} == {"entailment"}
    summaries = summarize(read_results(tmp_path))
    for task, name, split in (("CoLA", "CoLA", "test"), ("MNLI", "MNLI-mm", "test1"), ("MNLI", "AX", "test")):
        prepared = read_glue_data(data, "AX" if name == "AX" else task)
        best = max((r for r in read_results(tmp_path) if r.task == task), key=lambda result: result.main)
        assert summaries[task].best.seed == best.seed
        checkpoint = tmp_path / best.directory / "checkpoint_best.pt"
        expected = prepared.predict(load_checkpoint(checkpoint), split, 80, "cpu", threading.Event())
        written = [line.split("\t")[1] for line in files[f"{name}.tsv"][1:]]
        assert written[: len(expected)] == [prepared.label_names[i] for i in expected]
        assert set(written[len(expected) :]) == {prepared.label_names[0]}
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in files["STS-B.tsv"][1:])
    (tmp_path / best.directory / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match=r"runs/MNLI/.*/checkpoint_best\.pt is missing: restore it"):
        write_submission(tmp_path, data, summaries, 80, "cpu", threading.Event())
