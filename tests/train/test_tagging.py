"""``amos tag`` end to end: a small model learns labels of words."""

import itertools
import json
import re
from pathlib import Path

import pytest
from failures import error_line
from fine_tuning_tasks import fine_tune, write_recipe
from sklearn.metrics import classification_report
from synthetic_squad import untrained_checkpoint
from synthetic_tagging import NAMES_OF_COLUMNS, make_sentences, prepare_tagging, write_columns, write_conllu
from tiny_runs import run_of

import amos_fairseq
from amos_fairseq.cli.main import main
from amos_fairseq.inputs.schemes import spans_of
from amos_fairseq.inputs.word_files import read_sentences

pytestmark = pytest.mark.slow

# The long sentences have more tokens.
MAX_POSITIONS = 40
REPORTED = ("precision", "recall", "f1-score", "support")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tagging")
    data = prepare_tagging(directory)
    untrained_checkpoint(directory / "start", data, MAX_POSITIONS)
    write_recipe(directory, "tagging", epochs=12, num_separators=2)
    return directory


@pytest.fixture(scope="module")
def learned(place) -> str:
    return fine_tune("tag", place, place / "out", "--data", place / "data")


@pytest.fixture(scope="module")
def learned_pos(place) -> str:
    """Tested on the sentences of dev, of which the first word has a label that nothing else has."""
    sentences = make_sentences()
    sentences[0][0] = (sentences[0][0][0], "unseen", "O")
    test = write_columns(place / "test.txt", sentences)
    source = ["--train", place / "train.txt", "--dev", place / "train.txt", "--test", test, *NAMES_OF_COLUMNS]
    return fine_tune("tag", place, place / "pos", *source, "--column", "pos")


def predictions(file: Path) -> list[list[list[str]]]:
    blocks = file.read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [[line.split("\t") for line in block.split("\n")] for block in blocks]


def test_entities_and_parts_of_speech_are_learned(place, learned, learned_pos):
    """Read words are learned; cut ones are counted, reported and wrong. One column is of raw files."""
    of_ner = run_of(place / "out", "tagging-ner")
    scores = json.loads((of_ner / "scores.json").read_text())
    rows = [row for sentence in predictions(of_ner / "predictions.txt") for row in sentence]
    words = [word for sentence in make_sentences() for word, _, _ in sentence]
    assert [row[0] for row in rows] == words
    cut = scores["words"] - scores["right_words"]
    assert 0 < cut < len(words) / 4
    # One span is cut in its middle; those behind the cut are missing.
    assert scores["right_spans"] <= scores["found_spans"] < scores["spans"]
    log = (of_ner / "train.log").read_text()
    assert f"{cut} words at the ends of 4 sentences are cut" in log
    assert f"{cut} of {len(words)} dev words are cut from 4 sentences of more than {MAX_POSITIONS} tokens" in learned
    validated = [line for line in log.splitlines() if "| valid |" in line][-1]
    assert f"| f1 {scores['f1']:.2f}".rstrip("0") in validated

    assert "ner: synthetic" in learned
    assert "ner: most frequent label (O)" in learned
    assert json.loads((place / "out" / "tagging.json").read_text())["tasks"]["tagging-ner"]["main_score"] == "f1"

    best = run_of(place / "pos", "tagging-pos")
    assert f"\nto export the selected run: amos export {best}/checkpoint_" in learned_pos
    summary = json.loads((place / "pos" / "tagging.json").read_text())
    accuracy = summary["tasks"]["tagging-pos"]["scores"]["accuracy"]["median"]
    of_pos = predictions(best / "predictions.txt")
    gold = [[(word, pos) for word, pos, _ in sentence] for sentence in make_sentences()]
    assert [[(word, pos) for word, pos, _ in sentence] for sentence in of_pos] == gold, "labels may contain spaces"
    details = {table["title"]: table for table in summary["details"]}
    of_test = predictions(best / "predictions.test.txt")
    as_dev = [rows for rows in of_pos if rows[-1][2] != "<cut>"]
    assert len(of_pos) == len(as_dev) + 4
    assert all([row[::2] for row in rows] in [[row[::2] for row in other] for other in of_test] for rows in as_dev)
    for split, labeled in (("dev", of_pos), ("test", of_test)):
        labels, found = zip(*((label, found) for rows in labeled for _, label, found in rows), strict=True)
        expected = classification_report(labels, found, output_dict=True, zero_division=0)
        numbers = [(name, *map(expected[name].get, REPORTED)) for name in sorted({*labels, *found} - {"<cut>"})]
        cells = [[name, *(f"{100 * each:.1f}" for each in ratios), f"{n:.0f}"] for name, *ratios, n in numbers]
        assert details[f"pos, words of {split}"]["rows"] == cells
    right = sum(label == found for rows in of_test for _, label, found in rows)
    assert details["pos, test"]["rows"][0] == ["pos: best run on dev", f"{100 * right / len(words):.1f}"]
    assert details["pos, test"]["rows"][1][0].startswith("pos: most frequent label (")
    assert details["pos, test"]["notes"][0].startswith(
        f"test has {len(words)} words; standard error of accuracy at least "
    )
    assert not any(found == "<cut>" for rows in of_test for _, _, found in rows), "long sentences are read in windows"
    assert "pos, words of test" in learned_pos
    most = 100 * (1 - cut / len(words))
    assert most - 8 < accuracy <= most + 1e-6
    before = (of_ner / "result.json").stat().st_mtime_ns
    assert "1 of 1 runs are already finished" in fine_tune("tag", place, place / "out", "--data", place / "data")
    assert (of_ner / "result.json").stat().st_mtime_ns == before


def test_other_words_get_the_labels_of_the_evaluation(place, learned, learned_pos, tmp_path, capsys):
    """Word for word, with raw text or without, and those that are cut from dev by windows; the labels of FILE are ignored."""
    source, predict = place / "train.txt", ["tag", "--cpu", "--predict"]
    outs = {"ner": place / "out", "pos": place / "pos"}
    by_column = {
        column: predictions(run_of(folder, f"tagging-{column}") / "predictions.txt") for column, folder in outs.items()
    }
    words = [[word for word, _, _ in rows] for rows in make_sentences()]
    is_cut = [any(label == "<cut>" for _, _, label in rows) for rows in by_column["pos"]]
    assert sum(is_cut) == 4
    others = [[(word, "X", "O") for word in rows] for rows in words]
    write_conllu(tmp_path / "glued", others, "SpaceAfter=No")  # words in columns trained, joined by spaces
    (tmp_path / "text").write_text("".join(" ".join(rows) + "\n" for rows in words))
    for form in ("glued", "text"):
        for place_of_label, column in ((2, "ner"), (1, "pos")):
            out = tmp_path / f"{form}.{column}.tsv"
            main([*predict, str(tmp_path / form), "--out", str(out), "--checkpoint", str(outs[column])])
            found = predictions(out)
            of_dev = [[[word, label] for word, _, label in rows] for rows in by_column[column]]
            assert [rows for rows, cut in zip(found, is_cut, strict=True) if not cut] == [
                rows for rows, cut in zip(of_dev, is_cut, strict=True) if not cut
            ], form
            gold = [[word[0], word[place_of_label]] for rows in make_sentences() for word in rows]
            wrong = sum(one != other for one, other in zip(itertools.chain(*found), gold, strict=True))
            assert wrong <= 0.08 * len(gold), "as of dev, whose words that are cut are not read"
            printed = capsys.readouterr()
            assert re.search(f"tag: {tmp_path / form}: [^,]*: 40 sentences of ", printed.err)
            assert f"{out}, {column}: 40 sentences" in printed.out
            best = run_of(outs[column], f"tagging-{column}").relative_to(outs[column])
            assert f"{best} was selected on dev" in printed.err
    raw = [" ".join(rows).replace(" ,", ",") for rows in words]
    (tmp_path / "raw").write_text("\n\n".join(raw))
    for form, column in (("glued", "pos"), ("glued", "ner"), ("raw", "ner")):
        out = tmp_path / f"{form}.{column}.jsonl"
        main([*predict, str(tmp_path / form), "--out", str(out), "--checkpoint", str(outs[column])])
        results = list(map(json.loads, out.read_text().splitlines()))
        assert all(0.2 < span["probability"] <= 1 for result in results for span in result["spans"])
        if form == "raw":
            found = amos_fairseq.load(outs[column]).predict(result["text"] for result in results)
            assert found == [result["spans"] for result in results]
        for rows, result, cut in zip(by_column[column], results, is_cut, strict=True) if form == "glued" else ():
            if cut:
                continue
            expected = [(word, label) for word, _, label in rows]
            if column == "ner":
                spans = spans_of([label for _, _, label in rows])
                expected = [("".join(row[0] for row in rows[first : last + 1]), kind) for kind, first, last in spans]
            text = result["text"]
            assert [(text[span["start"] : span["end"]], span["label"]) for span in result["spans"]] == expected
    assert "one text a line: 40 sentences of" in capsys.readouterr().err
    assert [(result["line"], result["text"]) for result in results] == list(zip(range(1, 80, 2), raw, strict=True))
    for sentence, result in zip(read_sentences(out).sentences, results, strict=True):  # what it wrote is what it reads
        spans, places = spans_of(sentence.columns["label"]), sentence.places()[1]
        found = [(span["label"], span["start"], span["end"]) for span in result["spans"]]
        assert found == [(kind, places[first][0], places[last][1]) for kind, first, last in spans]
    poem = tmp_path / "poem.txt"
    poem.write_text("Anna Berg slept\nPaul Smith ate\n\nMaria Lopez left\n")
    for file, column, flags, message in (
        (source, "pos", ["--column", "nerr"], "no column nerr: give another --column"),
        (source, "pos", ["--lr", "1"], "--lr has no effect with --predict: leave it out"),
        (source, "ner", [], "has lines that end in labels of ner: name its columns"),
        (poem, "pos", [], "no column of labels of pos: name its columns with --columns, or if it is text, write --out"),
    ):
        out = tmp_path / ("l.jsonl" if column == "ner" else "l")
        words = [*predict, file, "--checkpoint", outs[column], "--out", out, *flags]
        assert message in error_line(capsys, main, *words, reports_progress=True)
        assert not out.exists()
