"""``amos score`` on untrained models: its files, continuation after a stop, a full disk, memory, and errors."""

import csv
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
from amos_fairseq.scoring.token_scorers import DetectionScorer, MaskedScorer

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
        *("text.txt --pairs p.jsonl", "--rerank nbest.json --lambda 1 --pairs p.jsonl", "text.txt --baseline"),
        *(
            f"--pairs p.jsonl {flag}"
            for flag in ("--format tsv", "--electra-formula exact", "--dev d.json", "--lambda 1")
        ),
        *("text.txt --corpus DATA", "--rerank nbest.json --lambda 1 --baseline"),
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


PAIRS = [("the quick fox", "the quick end"), ("a lazy dog jumps", "a lazy dog over"), ("the  end", "the end")]


def write_pairs(file, uids=("nouns", "verbs", "spaces")):
    lines = [
        json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": uid, "linguistics_term": "agreement"}) + "\n"
        for (good, bad), uid in zip(PAIRS, uids, strict=True)
    ]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def scores_of_pairs(out):
    with out.with_suffix(".pairs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("objective", ["mlm", "electric"])
def test_accuracy_on_pairs_is_that_of_the_scores_of_lines(tmp_path, capsys, objective):
    """PLLs equal those of the command without --pairs, and so does the accuracy that follows from them."""
    run = str(write_run(tmp_path / "run", objective))
    pairs, out, text = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text("".join(f"{line}\n" for pair in PAIRS for line in pair), encoding="utf-8")
    main(["score", run, str(text)])
    plls = [float(row[1]) for row in table(capsys.readouterr().out)]
    assert main(["score", run, "--pairs", str(pairs), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = [float(row[f"{objective}, {side}"]) for row in scores_of_pairs(out) for side in ("good", "bad")]
    assert found == pytest.approx(plls, abs=2e-4)  # other batches
    right = sum(plls[i] > plls[i + 1] for i in (0, 2)) + 0.5
    overall = json.loads(out.read_text(encoding="utf-8"))["overall"]
    assert overall["scores"][objective]["accuracy"] == round(100 * right / 3, 4)
    assert overall["scores"][objective]["ties"] == 1
    assert f"* equal scores, of 3 pairs: {objective} 1\n" in printed
    assert "* no column unigram: the tokenizer's dict.txt has no counts" in printed
    assert printed.endswith(f"results: {out}, {tmp_path}/out.md, {tmp_path}/out.csv, {tmp_path}/out.pairs.csv\n")


def test_pairs_with_both_baselines_and_all_files(tmp_path, capsys):
    run = write_run(tmp_path / "run", "teams")
    text, data = tmp_path / "corpus.txt", tmp_path / "data"
    text.write_text("the quick brown fox jumps over the lazy dog\n\nthe end of the dog\n" * 20, encoding="utf-8")
    main(["prepare", str(text), "--out", str(data), "--tokenizer", str(run / "tokenizer"), "--workers", "1"])
    out = tmp_path / "out.json"
    command = ["score", str(run), "--pairs", str(write_pairs(tmp_path / "pairs.jsonl")), "--corpus", str(data)]
    capsys.readouterr()
    assert main([*command, "--baseline", "--out", str(out)]) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    columns = ["teams", "unigram", "random weights"]
    assert list(content["overall"]["scores"]) == columns
    setup = content["setup"]
    assert setup["checkpoint"]["objective"] == "teams"
    assert "no probability of a sentence, but an order" in setup["score"]["teams"]
    assert setup["random_weights_seed"] == 1
    assert (setup["files"][0]["file"], setup["files"][0]["pairs"]) == (str(tmp_path / "pairs.jsonl"), 3)
    low, high = content["overall"]["scores"]["teams"]["interval"]
    assert 0 <= low < content["overall"]["scores"]["teams"]["accuracy"] < high <= 100
    header, *rows = csv.reader(out.with_suffix(".csv").read_text(encoding="utf-8").splitlines())
    assert header == ["UID", "pairs", *columns]
    assert [row[:2] for row in rows[-3:]] == [["all of agreement", "3"], ["all pairs", "3"], ["95 % interval", ""]]
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert names == ["out.csv", "out.json", "out.md", "out.pairs.csv"]
    first = out.read_bytes()
    capsys.readouterr()
    main([*command, "--baseline", "--out", str(out)])
    assert out.read_bytes() == first


GOOD = '{"sentence_good": "the fox", "sentence_bad": "the dog"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{GOOD}\n{{oops", "p.jsonl, line 2: the line is not JSON .*; each line must be an object with the strings"),
        (f'{GOOD}\n["the fox"]', "p.jsonl, line 2: the line contains .'the fox'., not an object"),
        ('{"sentence_good": "the fox"}', "p.jsonl, line 1: it has no field sentence_bad"),
        ('{"sentence_good": 3, "sentence_bad": "a"}', "p.jsonl, line 1: sentence_good is 3, not a string"),
        ('{"sentence_good": "a", "sentence_bad": "  "}', "p.jsonl, line 1: sentence_bad is empty"),
        (
            '{"sentence_good": "a", "sentence_bad": "\\u200b"}',
            "line 1: sentence_bad has no character that the tokenizer",
        ),
        ('{"sentence_good": "a\\u001b[31m", "sentence_bad": "b"}', "line 1: sentence_good: .* cannot be printed"),
        ('{"sentence_good": "a\\ud800", "sentence_bad": "b"}', "line 1: sentence_good: .* cannot be printed"),
        (f'{GOOD[:-1]}, "UID": "\\u001b[2J"}}', "line 1: UID: .*x1b.2J' has a character that cannot be printed"),
        (f'{GOOD[:-1]}, "UID": null}}', "line 1: UID: None is not a string"),
        (f'{GOOD[:-1]}, "linguistics_term": 7}}', "line 1: linguistics_term: 7 is not a string"),
        ("\n \n", "p.jsonl has no pairs: each line must be an object"),
        (b"a\xff", "p.jsonl, line 1, byte 1: not UTF-8"),
    ],
)
def test_files_that_are_no_pairs_are_one_line(run, tmp_path, monkeypatch, capsys, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = error_line(capsys, main, "score", run, "--pairs", "p.jsonl", "--out", "out.json")
    assert re.search(message, line)
    assert line.isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--pairs absent.jsonl",
            r"absent.jsonl: the pairs cannot be read \(No such file or directory\): give files of",
        ),
        ("--pairs folder", "folder is a folder or a pipe, not a file: give files of JSON lines"),
        ("--pairs p.jsonl ./p.jsonl", "--pairs names .*p.jsonl twice, and its pairs would count twice"),
        ("--pairs p.zip", "p.zip: .zip files are not supported"),
        ("--pairs broken.jsonl.gz", "broken.jsonl.gz is damaged"),
        ("--pairs p.jsonl --out p.txt", "--out p.txt must end with .json"),
        ("--pairs p.json --out p.json", "--out p.json is the input file itself"),
        ("--pairs p.csv --out p.json", "--out p.json would overwrite the input file p.csv"),
        ("--pairs p.jsonl --out folder.json", "--out folder.json is a folder"),
        ("--pairs p.jsonl --out q.json", "--out q.json would also write q.md, which is a folder: give another name"),
        ("--pairs p.jsonl --out absent/out.json", r"absent/out.json.unfinished cannot be written \(No such file"),
        ("--pairs p.jsonl --corpus absent", "--corpus absent is not a directory: give the one that amos prepare wrote"),
        ("--pairs p.jsonl --corpus folder", "folder/train.bin is missing"),
    ],
)
def test_mistakes_around_pairs_are_one_line(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.json", "p.csv", "p.zip", "broken.jsonl.gz"):
        (tmp_path / name).write_text(GOOD)
    for name in ("folder", "folder.json", "q.md"):
        (tmp_path / name).mkdir()
    assert re.search(message, error_line(capsys, main, "score", run, *arguments.split()))
    assert not list(tmp_path.glob("out*"))


def test_refused_models_say_so_in_one_line(tmp_path, capsys):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    fine_tuned = write_run(tmp_path / "fine_tuned", "electra", classes=2)
    line = error_line(capsys, main, "score", fine_tuned, "--pairs", pairs)
    assert "was fine-tuned and has no score for minimal pairs" in line
    run = write_run(tmp_path / "run", "electra")
    state = torch.load(run / "checkpoint_last.pt", weights_only=True)
    state["model"]["detection_head.output.bias"].fill_(math.nan)
    torch.save(state, run / "checkpoint_last.pt")
    line = error_line(capsys, main, "score", run, "--pairs", pairs)
    assert re.search(r"no finite score for .* in .*pairs.jsonl, line 1: its training diverged", line)


def test_stopped_pairs_continue(tmp_path, capsys, monkeypatch):
    """Stopped while random weights score: the model's own scores are kept, and the results are those of one call."""
    run, pairs = write_run(tmp_path / "run", "electra"), write_pairs(tmp_path / "pairs.jsonl")
    command = ["score", str(run), "--pairs", str(pairs), "--baseline", "--out"]
    main([*command, str(tmp_path / "whole.json")])
    calls, log_probs = [], DetectionScorer.log_probs

    def interrupted(self, sequences):
        calls.append(len(sequences))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return log_probs(self, sequences)

    monkeypatch.setattr(DetectionScorer, "log_probs", interrupted)
    assert main([*command, str(tmp_path / "out.json")]) == 130
    names = sorted(path.name for path in tmp_path.glob("out*"))
    assert names == ["out.json.unfinished", "out.random.json.unfinished"]
    capsys.readouterr()
    assert main([*command, str(tmp_path / "out.json")]) == 0
    assert "out.json.unfinished: 5 of 5 lines are already scored" in capsys.readouterr().err
    assert calls == [5, 5, 5]
    assert not list(tmp_path.glob("*unfinished"))
    for name in ("{}.json", "{}.md", "{}.csv", "{}.pairs.csv"):
        assert (tmp_path / name.format("out")).read_bytes() == (tmp_path / name.format("whole")).read_bytes()
