"""``amos score`` on untrained models: its files, continuation after a stop, a full disk, memory, and errors."""

import io
import json
import math
import os
import re
import shutil

import pytest
import torch
from failures import error_line, full_disk
from saved_models import write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.scoring.jobs import score_file
from amos_fairseq.scoring.pseudo_likelihood import LineScorer, windows
from amos_fairseq.scoring.token_scorers import MaskedScorer

LINES = ["the quick brown fox", "", "a lazy dog jumps", "Xyz the end", "the fox " * 100, " ", "jumps over the end"]
TOO_LONG = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), "mlm")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("\r\n".join(LINES).encode())  # the last line has no end
    return file


def table(output: str) -> list[list[str]]:
    head, *rows = (line.split("\t") for line in output.splitlines())
    assert head == ["line", "pll", "num_pieces", "num_unknown", "pieces", "log_probs"]
    return rows


def test_one_row_per_line_in_order(run, text, capsys):
    assert main(["score", str(run), str(text), "--batch-tokens", "64"]) == 0
    captured = capsys.readouterr()
    rows = table(captured.out)
    assert [row[0] for row in rows] == [str(number) for number in range(1, 8)]
    loaded = load_checkpoint(run)
    for line, (_, pll, num_pieces, num_unknown, pieces, log_probs) in zip(LINES, rows, strict=True):
        assert pieces.split() == loaded.tokenizer.encode(line)
        assert int(num_pieces) == len(pieces.split())
        if len(pieces.split()) > 148:
            assert (pll, log_probs) == ("", "")
            continue
        values = log_probs.split()
        assert pieces.split().count("<unk>") == int(num_unknown)
        # Six decimals each.
        assert float(pll) == pytest.approx(math.fsum(map(float, values)), abs=1e-6 * (len(values) + 1))
    assert [row[1] for row in rows if not row[4]] == ["0.000000"] * 2, "lines 2 and 6 are empty"
    assert rows[3][3:5] == ["1", "▁ <unk> y z ▁the ▁e nd"]
    assert "longer than the model's limit of 150 tokens: 1, the first is line 5\n" in captured.err
    assert "unknown to the vocabulary, scored as random characters: 1\n" in captured.err


def test_unknown_characters_are_worse_than_any_word(run, tmp_path, capsys):
    """A run of characters is one piece: one of the 64 entries and five of 1,114,112 code points; a test of the formula."""
    (tmp_path / "text.txt").write_text("the 日本語中国 fox\nthe quick fox\n", encoding="utf-8")
    main(["score", str(run), str(tmp_path / "text.txt")])
    unknown, known = table(capsys.readouterr().out)
    assert unknown[3:5] == ["1", "▁the ▁ <unk> ▁ fo x"]
    entries = len(load_checkpoint(run).dictionary)
    assert float(unknown[5].split()[2]) == pytest.approx(math.log(1 / entries / 1_114_112**5), abs=1e-6)
    assert float(unknown[1]) < float(known[1]) - 50


def test_input_of_a_stream(run, text, tmp_path, capsys, monkeypatch):
    """A stream can be read once; the rows are those of the file, and a continued OUT is recognized by its content."""
    main(["score", str(run), str(text)])
    expected = capsys.readouterr().out
    for out in ([], ["--out", str(tmp_path / "scores.tsv")]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
        assert main(["score", str(run), "-", *out]) == 0
        printed = capsys.readouterr().out
        assert (printed if not out else (tmp_path / "scores.tsv").read_text(encoding="utf-8")) == expected
    read_end, write_end = os.pipe()
    os.write(write_end, text.read_bytes())
    os.close(write_end)
    main(["score", str(run), f"/dev/fd/{read_end}"])
    os.close(read_end)
    assert capsys.readouterr().out == expected


def test_too_long_hypotheses_are_skipped_and_named(run, tmp_path, capsys):
    """The other list is reranked; a list without a score keeps the recognizer's choice."""
    hypotheses = [("日本語中国", 0.0), (LINES[TOO_LONG - 1], 5.0), ("a dog", -1.0)]
    unknown, long, known = ({"text": text, "score": score} for text, score in hypotheses)
    lists = {
        "first": {"reference": "a dog", "hypotheses": [unknown, long, known]},
        "second": {"reference": "the fox", "hypotheses": [long]},
    }
    (tmp_path / "nbest.json").write_text(json.dumps(lists))
    assert main(["score", str(run), "--rerank", str(tmp_path / "nbest.json"), "--lambda", "1"]) == 0
    captured = capsys.readouterr()
    winners = json.loads(captured.out)["reranked"]
    assert [(winner["place"], winner["pll"] is None) for winner in winners.values()] == [(3, False), (1, True)]
    for name in ("hypothesis 2 of 'first'", "hypothesis 1 of 'second'"):
        assert f"nbest.json: {name} is skipped: it has 402 tokens, more than the model's limit of 150\n" in captured.err


def test_scores_are_those_of_the_model(run, text, capsys):
    """One line against the loss of the model's own forward pass, with one masked position at a time."""
    main(["score", str(run), str(text)])
    values = [float(value) for value in table(capsys.readouterr().out)[2][5].split()]
    loaded = load_checkpoint(run)
    tokens = loaded.tokens(LINES[2])[None]
    for position, value in enumerate(values, start=1):
        masked = tokens.index_fill(1, torch.tensor(position), loaded.dictionary.index("<mask>"))
        with torch.no_grad():
            nll = loaded.model(tokens, masked, torch.tensor([[position]]), torch.ones(1, 1)).mlm_nll
        assert value == pytest.approx(-nll.item(), abs=2e-4)  # batches change the order of float32 sums


def test_json_lines_equal_the_table(run, text, tmp_path, capsys):
    main(["score", str(run), str(text)])
    rows = table(capsys.readouterr().out)
    out = tmp_path / "scores.jsonl"
    main(["score", str(run), str(text), "--format", "jsonl", "--out", str(out)])
    assert capsys.readouterr().out == f"scores: {out}\n"
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [record["text"] for record in records] == LINES
    for record, row in zip(records, rows, strict=True):
        assert [str(record["line"]), str(record["num_unknown"]), " ".join(record["pieces"])] == [row[0], row[3], row[4]]
        assert (record["pll"] is None) == (record["log_probs"] is None) == (row[1] == "")
        if record["pll"] is not None:
            assert record["pll"] == pytest.approx(float(row[1]), abs=1e-6)
            assert ["-" if v is None else f"{v:.6f}" for v in record["log_probs"]] == row[5].split()
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_electra_takes_a_formula(tmp_path, text, capsys):
    run = write_run(tmp_path / "electra", "electra")
    outputs = {}
    for formula in ("exact", "thesis"):
        main(["score", str(run), str(text), "--electra-formula", formula])
        outputs[formula] = [float(row[1]) for row in table(capsys.readouterr().out) if row[5].strip("- ")]
    main(["score", str(run), str(text)])
    assert [float(row[1]) for row in table(capsys.readouterr().out) if row[5].strip("- ")] == outputs["exact"]
    # p q / (o (1 - p + p q) + p q) is below p q / (o (1 - p)).
    assert all(exact < thesis for exact, thesis in zip(*outputs.values(), strict=True))


def test_reranking_with_known_answer(run, tmp_path, capsys):
    """Scores with given crossings of f + lambda PLL, computed from PLLs of the command itself."""
    texts = ["the quick fox", "a dog", "over the end"]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    main(["score", str(run), str(tmp_path / "texts.txt")])
    pll = {line: float(row[1]) for line, row in zip(texts, table(capsys.readouterr().out), strict=True)}
    worse, better = sorted(texts[:2], key=pll.get)

    def lists(name, reference, crossing):
        """``better`` overtakes ``worse`` at lambda = ``crossing``."""
        score = -1.0 - crossing * (pll[better] - pll[worse])
        scores = {worse: -1.0, better: score, texts[2]: -1e6}
        hypotheses = [{"text": text, "score": score} for text, score in scores.items()]
        file = tmp_path / name
        file.write_text(json.dumps({"u": {"reference": reference, "hypotheses": hypotheses}}), encoding="utf-8")
        return str(file)

    nbest, dev = lists("nbest.json", better, 0.32), lists("dev.json", better, 0.42)
    out = tmp_path / "out.json"
    assert main(["score", str(run), "--rerank", nbest, "--dev", dev, "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["lambda"] == 0.45
    errors = found["dev"]["wer_of_lambda"]
    assert errors["0.40"] > errors["0.45"] == found["dev"]["wer_after"] == 0
    assert found["nbest"]["wer_before"] > found["nbest"]["wer_after"] == found["nbest"]["wer_oracle"] == 0
    winner = found["reranked"]["u"]
    assert (winner["text"], winner["place"], winner["word_errors"]) == (better, 2, 0)
    assert winner["pll"] == pytest.approx(pll[better], abs=1e-3)
    capsys.readouterr()
    main(["score", str(run), "--rerank", nbest, "--lambda", "0.3"])
    found = json.loads(capsys.readouterr().out)
    assert (found["lambda"], found["reranked"]["u"]["text"]) == (0.3, worse)
    assert "dev" not in found
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "text.txt"], "absent/checkpoint_last.pt is missing|absent is missing"),
        (["run", "absent.txt"], r"absent.txt: the text cannot be read \(No such file"),
        (["run", "latin1.txt"], "latin1.txt, line 2: not UTF-8 at byte 1"),
        (["run", "text.txt", "--out", "absent/scores.tsv"], r"absent/scores.tsv.unfinished cannot be written \(No"),
        (["run", "text.txt", "--out", "text.txt"], "--out text.txt is the input file itself"),
        (["run", "text.txt", "--out", "."], "--out . is a folder: give the name of a file"),
        (["run", "text.txt", "--batch-tokens", "0"], "--batch-tokens 0 must be 1 or more"),
        (["run", "text.txt", "--device", "abacus"], "device abacus cannot be used"),
        (["run", "text.txt", "--electra-formula", "thesis"], "--electra-formula has no effect"),
        (["amos", "text.txt"], "AmosModel, which gives no probability of a token: .*mlm, electra or electric"),
        (["nan", "text.txt"], "no finite score for .* in line 1"),
        (["run", "--rerank", "nbest.json", "--lambda", "-1"], "--lambda -1.0 must be a number from 0 on"),
    ],
)
def test_mistakes_are_one_line(run, text, monkeypatch, capsys, arguments, message):
    directory = text.parent
    monkeypatch.chdir(directory)
    shutil.copytree(run, directory / "run")
    (directory / "latin1.txt").write_bytes("a\nbé".encode("latin-1"))
    (directory / "nbest.json").write_text('{"u": {"reference": "a", "hypotheses": [{"text": "a", "score": 0}]}}')
    if arguments[0] == "amos":
        write_run(directory / "amos", "amos")
    if arguments[0] == "nan":
        shutil.copytree(run, directory / "nan")
        state = torch.load(directory / "nan" / "checkpoint_last.pt", weights_only=True)
        state["model"]["mlm_head.bias"].fill_(math.nan)
        torch.save(state, directory / "nan" / "checkpoint_last.pt")
    assert re.search(message, error_line(capsys, main, "score", *arguments))
    assert [path.name for path in directory.iterdir() if path.name.startswith("scores")] == []


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "text.txt --rerank nbest.json --lambda 1", "--rerank nbest.json", "text.txt --dev dev.json"),
        *("--rerank nbest.json --lambda 1 --dev dev.json", "--rerank nbest.json --lambda 1 --format tsv"),
        "text.txt --lambda 1",
    ],
)
def test_incompatible_flags_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["score", "run", *arguments.split()])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith("usage: amos score")


@pytest.fixture
def long_text(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("the quick brown fox\na lazy dog\n" * 20, encoding="utf-8")
    return file


def test_a_stopped_command_continues(run, long_text, tmp_path, capsys, monkeypatch):
    """Stopped after the second window, with its last row cut in two: the result is that of one run."""
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
    unfinished = tmp_path / "scores.tsv.unfinished"
    assert len(unfinished.read_text(encoding="utf-8").splitlines()) == 1 + sum(calls[:2])
    unfinished.write_bytes(unfinished.read_bytes()[:-9])
    monkeypatch.setattr(MaskedScorer, "log_probs", lambda self, s: calls.append(len(s)) or log_probs(self, s))
    capsys.readouterr()
    assert main([*command, str(tmp_path / "scores.tsv")]) == 0
    assert f"{sum(calls[:2]) - 1} of 40 lines are already scored" in capsys.readouterr().err
    assert sum(calls[3:]) == 40 - (sum(calls[:2]) - 1), "only the cut line is scored again"
    assert not unfinished.exists()
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


@pytest.mark.parametrize("rows", ["null", "[1]", '["x", 5]', "[-1.5, 1e999]", "[-1.5, 4]\n" * 2, "\udcff", "[" * 10**5])
def test_damaged_rows_are_not_continued(run, tmp_path, capsys, monkeypatch, rows):
    nbest, out = tmp_path / "nbest.json", tmp_path / "out.json"
    nbest.write_text('{"u": {"reference": "the fox", "hypotheses": [{"text": "the fox", "score": 0}]}}')
    command = ["score", str(run), "--rerank", str(nbest), "--lambda", "1", "--out", str(out)]
    monkeypatch.setattr("amos_fairseq.scoring.jobs.write_whole", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    main(command)
    monkeypatch.undo()
    unfinished = tmp_path / "out.json.unfinished"
    identity = unfinished.read_bytes().splitlines(keepends=True)[0]
    unfinished.write_bytes(identity + rows.encode(errors="surrogateescape") + b"\n")
    line = error_line(capsys, main, *command, reports_progress=True)
    assert "out.json.unfinished is damaged: remove it and repeat the command" in line
    assert not out.exists()
    unfinished.unlink()
    assert main(command) == 0


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_unfinished_rows_are_not_written_through_a_link(run, long_text, tmp_path, capsys, link):
    precious = tmp_path / "precious"
    precious.write_text("precious\n")
    link(precious, tmp_path / "scores.tsv.unfinished")
    command = ["score", str(run), str(long_text), "--out", str(tmp_path / "scores.tsv")]
    if link is os.symlink:
        assert "scores.tsv.unfinished is a link" in error_line(capsys, main, *command)
    else:
        assert main(command) == 0
    assert precious.read_text() == "precious\n"


def test_no_more_lines_are_read_than_a_window_needs(run):
    """At most 32 batches or 4,096 lines, so that memory does not grow with the file."""
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
    assert scorer.loaded.tokenizer.sha256  # computed now, because it writes files
    with full_disk(1000), pytest.raises(UserError, match=r"scores.tsv.unfinished cannot be written \(File too large\)"):
        score_file(scorer, long_text, "tsv", out)
    assert out.read_text(encoding="utf-8") == "old"
    score_file(scorer, long_text, "tsv", out)  # the same call continues
    assert len(table(out.read_text(encoding="utf-8"))) == 40
