"""The archive for the leaderboard on synthetic test sets: predictions, rows, filled files."""

import threading
import zipfile

import pytest

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.classification.benchmark import read_glue_data
from amos_fairseq.downstream.classification.glue.leaderboard import fill_broken_lines, write_submission
from amos_fairseq.downstream.results import read_results, summarize
from amos_fairseq.errors import UserError


@pytest.mark.slow
def test_archive_of_the_leaderboard(data, tmp_path, glue):
    outcome = glue(tmp_path, "CoLA", "STS-B", "MNLI", "RTE", with_test=True, seeds=2)
    with zipfile.ZipFile(tmp_path / "glue_submission.zip") as archive:
        files = {name: archive.read(name).decode().splitlines() for name in archive.namelist()}
    official = {"SST-2": 1821, "MRPC": 1725, "QNLI": 5463, "QQP": 390965, "RTE": 3000, "WNLI": 146}
    official |= {"CoLA": 7, "STS-B": 5, "MNLI-m": 6, "MNLI-mm": 4, "AX": 3}  # prepared
    assert {name: len(lines) - 1 for name, lines in files.items()} == {f"{n}.tsv": rows for n, rows in official.items()}
    assert {lines[0] for lines in files.values()} == {"index\tprediction"}
    assert [line.split("\t")[0] for line in files["MNLI-mm.tsv"][1:]] == ["0", "1", "2", "3"]
    # RTE was run, but no test file was prepared; SST-2 was not run at all.
    filled = [notice.split()[0] for notice in outcome.notices]
    assert filled == ["SST-2.tsv", "MRPC.tsv", "QQP.tsv", "QNLI.tsv", "RTE.tsv", "WNLI.tsv"]
    assert {line.split("\t")[1] for line in files["RTE.tsv"][1:]} == {"entailment"}
    summaries = summarize(read_results(tmp_path))
    for task, name, split in (("CoLA", "CoLA", "test"), ("MNLI", "MNLI-mm", "test1"), ("MNLI", "AX", "test")):
        prepared = read_glue_data(data, "AX" if name == "AX" else task)
        best = max((r for r in read_results(tmp_path) if r.task == task), key=lambda result: result.main)
        assert summaries[task].best.seed == best.seed
        checkpoint = tmp_path / best.directory / "checkpoint_best.pt"
        expected = prepared.predict(load_checkpoint(checkpoint), split, 80, "cpu", threading.Event())
        assert [line.split("\t")[1] for line in files[f"{name}.tsv"][1:]] == [prepared.label_names[i] for i in expected]
    assert all(0 <= float(line.split("\t")[1]) <= 5 for line in files["STS-B.tsv"][1:])
    (tmp_path / best.directory / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match=r"runs/MNLI/.*/checkpoint_best\.pt is missing: restore it"):
        write_submission(tmp_path, data, summaries, 80, "cpu", threading.Event())


def test_rows_of_broken_lines_are_filled_in_order():
    """The server takes a row for every line. CoLA's official test set has 1,063 rows."""

    def filled(num_broken, ids):
        table = {str(index): "1" for index in ids}
        return fill_broken_lines(table, num_broken, 1063, "0"), list(table.items())

    notice, rows = filled(2, [0, 2, 3])
    assert rows == [("0", "1"), ("1", "0"), ("2", "1"), ("3", "1"), ("4", "0")]
    assert notice.startswith("2 rows, for broken lines of the test file, are filled")
    # A row that a line end has broken in two: two lines, one row.
    notice, rows = filled(2, [i for i in range(1063) if i != 500])
    assert (len(rows), rows[500], notice[:6]) == (1063, ("500", "0"), "1 rows")
    notice, rows = filled(1, ["a", "b"])
    assert [row[0] for row in rows] == ["a", "b"]
    assert "the server may refuse the file" in notice
