"""``amos score`` on long files: what a stop or a full disk leaves, and how much is read at once."""

import math

import pytest
from full_disk import full_disk
from saved_models import write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.scoring.jobs import score_file
from amos_fairseq.scoring.pseudo_likelihood import LineScorer, windows
from amos_fairseq.scoring.token_scorers import MaskedScorer
from tests.cli.test_score import table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), "mlm")


@pytest.fixture
def long_text(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("the quick brown fox\na lazy dog\n" * 20, encoding="utf-8")
    return file


def test_a_stopped_command_continues(run, long_text, tmp_path, capsys, monkeypatch):
    """Stopped after the second window, and the last row that it kept cut in two: the result is that of one run."""
    command = ["score", str(run), str(long_text), "--batch-tokens", "16", "--out"]
    main([*command, str(tmp_path / "whole.tsv")])
    calls, log_probs = [], MaskedScorer.log_probs

    def interrupted(self, sequences):
        calls.append(len(sequences))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return log_probs(self, sequences)

    monkeypatch.setattr(MaskedScorer, "log_probs", interrupted)
    assert main([*command, str(tmp_path / "scores.tsv")]) == 130
    assert not (tmp_path / "scores.tsv").exists()
    kept = tmp_path / "scores.tsv.unfinished"
    assert len(kept.read_text(encoding="utf-8").splitlines()) == 1 + sum(calls[:2])
    kept.write_bytes(kept.read_bytes()[:-9])
    monkeypatch.setattr(
        MaskedScorer, "log_probs", lambda self, given: calls.append(len(given)) or log_probs(self, given)
    )
    capsys.readouterr()
    assert main([*command, str(tmp_path / "scores.tsv")]) == 0
    assert f"{sum(calls[:2]) - 1} of 40 lines are already scored" in capsys.readouterr().err
    assert sum(calls[3:]) == 40 - (sum(calls[:2]) - 1), "nothing is scored twice but the cut line"
    assert not kept.exists()
    whole, continued = ((tmp_path / name).read_text(encoding="utf-8") for name in ("whole.tsv", "scores.tsv"))
    for a, b in zip(table(whole), table(continued), strict=True):
        assert (a[0], a[2:5]) == (b[0], b[2:5])
        assert float(a[1]) == pytest.approx(float(b[1]), abs=1e-3)  # other windows, other batches


def test_rows_of_another_text_are_not_continued(run, long_text, tmp_path, capsys, monkeypatch):
    out, text = tmp_path / "scores.tsv", tmp_path / "short.txt"
    text.write_text("the end\na fox\n", encoding="utf-8")
    monkeypatch.setattr("amos_fairseq.scoring.jobs.write_whole", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    main(["score", str(run), str(long_text), "--out", str(out)])
    monkeypatch.undo()
    main(["score", str(run), str(text), "--out", str(out)])
    assert "was of another text, checkpoint or format: starting from line 1" in capsys.readouterr().err
    assert len(table(out.read_text(encoding="utf-8"))) == 2


def test_no_more_lines_are_read_than_a_window_needs(run):
    """So memory does not grow with the file: 32 batches of work, 4,096 lines at most."""
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield "the quick brown fox"

    scorer = LineScorer(load_checkpoint(run), tokens_per_batch=64)
    first = next(scorer.score_windows(endless()))
    passes = len(first[0].line.pieces)
    assert len(first) == math.ceil(32 * 64 / (passes * (passes + 2)))
    assert taken <= len(first) + 256
    assert len(next(windows(iter(lambda: first[0].line, None), cost=lambda line: 0, limit=10))) == 4096


def test_a_full_disk_is_one_line_and_leaves_the_old_file(run, long_text, tmp_path):
    out = tmp_path / "scores.tsv"
    out.write_text("old", encoding="utf-8")
    scorer = LineScorer(load_checkpoint(run), tokens_per_batch=4096)
    assert scorer.loaded.tokenizer.sha256  # known from here on; it needs files of its own
    with full_disk(1000), pytest.raises(UserError, match=r"scores.tsv.unfinished cannot be written \(File too large\)"):
        score_file(scorer, long_text, "tsv", out)
    assert out.read_text(encoding="utf-8") == "old"
    score_file(scorer, long_text, "tsv", out)  # there is room again: the same call goes on
    assert len(table(out.read_text(encoding="utf-8"))) == 40
