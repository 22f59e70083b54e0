"""What ``amos prepare text`` says of text that a model does not see, against counts by hand; ``corpus.json`` has the same."""

import json
import random
import re
import shlex

import pytest
from preparing import prepare
from tokenizer_text import word_level_directory

from amos_fairseq.downstream.classification.prepare import write_tables
from amos_fairseq.downstream.classification.rows import Tables
from amos_fairseq.text.tokenization import load_tokenizer

EVENTS = [f"E{number:03}" for number in range(66)]


def documents(words, number=80, length=20):
    draw = random.Random(3)
    return [" ".join(draw.choices(words, k=length)) for _ in range(number)]


def run(tmp_path, capsys, texts, *flags):
    """Return the printed shares in percent, what is printed with WARNING, and the counts of corpus.json."""
    (tmp_path / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
    prepare("text")([tmp_path / "text.txt", "--out", tmp_path / "out", "--workers", "1", *flags])
    printed = capsys.readouterr().err
    shares = re.search(r"([\d.]+)% of the pieces unknown \([\d,]+\), ([\d.]+)% of the characters in no piece", printed)
    warnings = [line for line in printed.splitlines() if "WARNING" in line]
    record = json.loads((tmp_path / "out" / "corpus.json").read_text(encoding="utf-8"))
    return *map(float, shares.groups()), warnings, record


def test_unknown_words(tmp_path, capsys):
    """A tokenizer of 60 of 66 events, of which each is a piece."""
    tokenizer = word_level_directory(tmp_path / "words", EVENTS[:60])
    unknown, dropped, warnings, record = run(tmp_path, capsys, documents(EVENTS), "--tokenizer", tokenizer)
    total = sum(record[split]["unknown"] for split in ("train", "valid"))
    assert total == sum(word in EVENTS[60:] for text in documents(EVENTS) for word in text.split())
    assert unknown == pytest.approx(100 * record["train"]["unknown"] / record["train"]["words"], abs=1e-3)
    assert (dropped, unknown > 5) == (0, True)
    assert len(warnings) == 1
    assert "this tokenizer does not fit the text: give another one" in warnings[0]
    named = re.split(r"without a piece, in [\d,]+ characters: ", warnings[0])[1]
    counts = {word: int(number) for word, number in re.findall(r"'(E\d+)' (\d+)", named)}
    assert set(counts) == set(EVENTS[60:])
    assert 0.9 * total < sum(counts.values()) <= total  # without the text for validation


def test_dropped_letters(tmp_path, capsys):
    """A BPE without an unknown token, which prepare names before it reads; every tenth character of the text is an x."""
    folder = word_level_directory(tmp_path / "bpe", [*"abcdefghi"], absent=["[UNK]"])
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] = {"type": "BPE", "vocab": content["model"]["vocab"], "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    texts = [f"{text} {number}" for number, text in enumerate(documents(["abcdexfghi", "abcdefghix"]))]
    texts = [re.sub(r"\d", "a", text) for text in texts]
    unknown, dropped, warnings, record = run(tmp_path, capsys, texts, "--tokenizer", folder)
    assert (unknown, record["train"]["unknown_share"]) == (0, 0)
    assert dropped == pytest.approx(10, abs=0.2)
    assert record["train"]["dropped_share"] == pytest.approx(dropped / 100, abs=1e-5)
    assert len(warnings) == 2
    assert "has no unknown token: it leaves out each character that its vocabulary lacks" in warnings[0]


@pytest.mark.parametrize("kind", ["tagging", "classify", "squad"])
def test_data_with_labels(kind, tmp_path, capsys):
    """Every third word is not in the vocabulary."""
    tokenizer = word_level_directory(tmp_path / "words", ["the", "fox", "dog"])
    file, out = tmp_path / "data.tsv", tmp_path / "out"
    if kind == "tagging":
        file.write_text("the\tDET\nfox\tNOUN\nhare\tNOUN\n\nthe\tDET\ndog\tNOUN\nowl\tNOUN\n\n" * 3)
        prepare(kind)([file, file, tokenizer, out])
    elif kind == "classify":
        file.write_text("text\tlabel\n" + "the fox hare\ta\nthe dog owl\tb\n" * 3)
        out.mkdir()
        write_tables(out, Tables(file, file).with_columns(), load_tokenizer(tokenizer))
    else:
        answer = {"text": "fox", "answer_start": 4}
        questions = [{"id": "1", "question": "the fox hare " * 3, "answers": [answer], "is_impossible": False}]
        paragraphs = [{"context": "the fox owl " * 3, "qas": questions}]
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        file.write_text(json.dumps(content))
        prepare(kind)([file, file, tokenizer, out])
    printed = capsys.readouterr().err
    assert (
        printed.count("33.333% of the pieces unknown (6), 0.000% of the characters in no piece: WARNING: a model") == 2
    )


def test_printed_commands_are_quoted_for_the_shell(tmp_path, capsys):
    out = tmp_path / "a b's #1"
    (tmp_path / "text.txt").write_text("\n\n".join(documents(EVENTS)), encoding="utf-8")
    prepare("text")([tmp_path / "text.txt", "--out", out, "--workers", "1", "--vocab-size", "99"])
    (command,) = re.findall(r"train with (.*) \(fairseq-train DATA\)", capsys.readouterr().err)
    assert shlex.split(command) == [f"task.data={out}"]


def test_a_tokenizer_that_amos_export_would_refuse(tmp_path, capsys):
    tokenizer = word_level_directory(tmp_path / "words", EVENTS, added=["[PAD]", "[CLS]", "[SEP]"])
    *shares, warnings, _ = run(tmp_path, capsys, documents(EVENTS), "--tokenizer", tokenizer)
    assert shares == [0, 0]
    assert len(warnings) == 1
    assert f"amos export will refuse models with {tokenizer}: the padding token [PAD] was added" in warnings[0]
