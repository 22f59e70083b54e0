"""``amos score`` on untrained models: its files, streams, a full disk, and errors."""

import gzip
import io
import json
import math
import re
import shutil

import pytest
from failures import error_line, full_disk
from saved_models import change_checkpoint, write_run

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.errors import UserError
from amos_fairseq.scoring.lines import score_file, windows
from amos_fairseq.scoring.token_scorers import MaskedScorer

LINES = ["the quick brown fox", "", "a lazy dog jumps", "Xyz the end", "the fox " * 100, " ", "jumps over the end"]


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
    """A stream can be read once; the rows are those of the file."""
    main(["score", str(run), str(text)])
    expected = capsys.readouterr().out
    for out in ([], ["--out", str(tmp_path / "scores.tsv")]):
        marked = b"\xef\xbb\xbf" + text.read_bytes()  # as in a file, the byte-order mark is no text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(marked)))
        assert main(["score", str(run), "-", *out]) == 0
        printed = capsys.readouterr().out
        assert (printed if not out else (tmp_path / "scores.tsv").read_text(encoding="utf-8")) == expected
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(text.read_bytes()))
    main(["score", str(run), str(tmp_path / "text.txt.gz")])
    assert capsys.readouterr().out == expected


GOOD = '{"sentence_good": "the fox", "sentence_bad": "the dog"}'


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("run latin1.txt", 1, "latin1.txt, line 2 is not UTF-8, .*docs/converting.md"),
        ("run folder", 1, "folder: is not a file"),
        ("run text.txt --out text.txt", 1, "text.txt is an input file or a folder"),
        ("run text.txt --batch-tokens 0", 2, "--batch-tokens: 0 must be at least 1"),
        ("run text.txt --device abacus", 1, "device abacus"),
        ("amos text.txt", 1, "mlm, electra or electric"),
        ("nan text.txt", 1, "no finite score for .* in line 1"),
        ("run text.txt --pairs p.jsonl", 2, "FILE"),
        ("run --pairs folder", 1, "folder/state.json is missing"),
        ("run --pairs cut.jsonl", 1, "cut.jsonl, line 2 is not JSON .*: each line has to be an object"),
        ("run --pairs number.jsonl", 1, "number.jsonl, line 1: 3 is not a printable string .*; give a table"),
        ("run --pairs empty.jsonl", 1, "empty.jsonl: its columns .* need different names"),
        ("run --pairs latin1.txt", 1, "latin1.txt is no table by its name"),
        (
            "run --pairs old.tsv",
            1,
            "old.tsv has no column 'sentence_good', it has good, bad: give a table .* MultiBLiMP",
        ),
        ("run --pairs p.jsonl --out folder", 1, "folder is an input file or a folder"),
        ("tuned --pairs p.jsonl", 1, "needs a pretraining checkpoint"),
        ("nan --pairs p.jsonl", 1, "no finite score for .* in .*p.jsonl, line 1"),
    ],
)
def test_mistakes_are_one_line(refused, monkeypatch, capsys, arguments, code, named):
    monkeypatch.chdir(refused)
    before = sorted(refused.rglob("*"))
    line = error_line(capsys, main, "score", *arguments.split(), reports_progress=True)
    assert line.startswith({1: "amos_fairseq: ", 2: "amos score: "}[code])
    assert re.search(named, line)
    assert line.isprintable()
    assert sorted(refused.rglob("*")) == before


@pytest.fixture(scope="module")
def refused(run, tmp_path_factory):
    """A folder with files and runs that cannot be scored."""
    directory = tmp_path_factory.mktemp("refused")
    shutil.copytree(run, directory / "run")
    (directory / "text.txt").write_bytes("\r\n".join(LINES).encode())
    (directory / "latin1.txt").write_bytes("a\nbé".encode("latin-1"))
    (directory / "p.jsonl").write_text(GOOD)
    (directory / "cut.jsonl").write_text(f"{GOOD}\n{{oops")
    (directory / "number.jsonl").write_text(GOOD.replace('"the fox"', "3"))
    (directory / "empty.jsonl").write_text("\n \n")
    (directory / "old.tsv").write_text("good\tbad\nthe fox\tthe end\n")
    (directory / "folder").mkdir()
    write_run(directory / "amos", "amos")
    write_run(directory / "tuned", "electra", classes=2)
    shutil.copytree(run, directory / "nan")
    weights = load_checkpoint(run).model.state_dict()
    change_checkpoint(directory / "nan", model=weights | {"mlm_head.bias": weights["mlm_head.bias"] + math.nan})
    return directory


def test_a_full_disk_is_one_line_and_leaves_the_old_file(run, tmp_path):
    text, out = tmp_path / "long.txt", tmp_path / "scores.tsv"
    text.write_text("the quick brown fox\na lazy dog\n" * 20, encoding="utf-8")
    out.write_text("old", encoding="utf-8")
    loaded = load_checkpoint(run)
    with full_disk(1000), pytest.raises(UserError, match=r"scores.tsv cannot be written \(File too large\)"):
        score_file(loaded, MaskedScorer(loaded, 4096), str(text), out)
    assert out.read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.txt", "scores.tsv"]


def test_windows_are_bounded_by_their_work():
    assert list(windows(range(10), lambda line: line, 8)) == [[0, 1, 2, 3, 4], [5, 6], [7, 8], [9]]


PAIRS = [("the quick fox", "the quick end"), ("a lazy dog jumps", "a lazy dog over"), ("the  end", "the end")]


def test_accuracy_on_pairs_is_that_of_the_scores_of_lines(run, tmp_path, capsys):
    """PLLs equal those of the command without --pairs, and so does the accuracy that follows from them."""
    pairs, out, text = tmp_path / "pairs.jsonl", tmp_path / "out.json", tmp_path / "text.txt"
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in PAIRS]
    pairs.write_text("".join(lines), encoding="utf-8")
    text.write_text("".join(f"{line}\n" for pair in PAIRS for line in pair), encoding="utf-8")
    main(["score", str(run), str(text)])
    plls = [float(row[1]) for row in table(capsys.readouterr().out)]
    assert main(["score", str(run), "--pairs", str(pairs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"scores: {out}\n")
    content = json.loads(out.read_text(encoding="utf-8"))
    found = [pair[side] for pair in content["pairs"] for side in ("good", "bad")]
    assert found == pytest.approx(plls, abs=2e-4)  # other batches
    right = sum(plls[i] > plls[i + 1] for i in (0, 2)) + 0.5
    scores = content["overall"]
    assert (scores["accuracy"], scores["ties"]) == (round(100 * right / 3, 4), 1)
