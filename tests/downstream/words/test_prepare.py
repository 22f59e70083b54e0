"""amos prepare tagging: every word with its label and its pieces, and errors."""

import gzip
import json
from pathlib import Path
from typing import Any

from failures import error_line
from fairseq.data.indexed_dataset import MMapIndexedDataset
from preparing import prepare
from synthetic_tagging import NAMES_OF_COLUMNS, make_sentences, write_columns, write_conllu

from amos_fairseq.downstream.words.dataset import Column
from amos_fairseq.downstream.words.prepare import WordSource, prepare_tagging_inside
from amos_fairseq.text.tokenization import load_tokenizer

main = prepare("tagging")


def words_of(data: Path, split: str) -> list[list[str]]:
    """The text of the pieces of each word, by sentence, from the files alone."""
    tokenizer = load_tokenizer(data / "tokenizer")
    arrays = [MMapIndexedDataset(str(data / f"{split}.{name}")) for name in ("tokens", "word_start", "word_end")]
    found = []
    for ids, starts, ends in zip(*arrays, strict=True):
        pieces = [tokenizer.dictionary_symbols[i - 4] for i in ids.tolist()]
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        found.append([tokenizer.decode(pieces[first:end]).strip() for first, end in places])
    return found


def manifest_of(data: Path) -> dict[str, Any]:
    return json.loads((data / "tagging.json").read_text(encoding="utf-8"))


def labels_of(data: Path) -> list[list[str]]:
    names = Column.of(data).labels
    return [[names[i] for i in labels.tolist()] for labels in MMapIndexedDataset(str(data / "valid.label"))]


def test_every_word_has_its_label_and_its_pieces(data):
    sentences = make_sentences()
    words = [[word for word, _, _ in rows] for rows in sentences]
    assert Column.of(data).read_words("valid") == words
    assert words_of(data, "valid") == [[word.lower() for word in rows] for rows in words]
    assert labels_of(data) == [[chunk for _, _, chunk in rows] for rows in sentences]
    manifest = manifest_of(data)
    assert (manifest["column"], manifest["labels"], manifest["has_spans"]) == ("ner", ["B-NAME", "I-NAME", "O"], True)
    num_words = sum(map(len, words))
    assert manifest["splits"]["train"]["words"] == manifest["splits"]["valid"]["words"] == num_words
    assert manifest["splits"]["train"]["unknown"] == 0


def test_conllu_has_the_raw_text(data, tmp_path):
    """The same sentences give the same pieces, with other labels, and without spaces those of the raw text."""
    source = write_conllu(tmp_path / "dev.txt", make_sentences())
    main([source, source, data / "tokenizer", tmp_path / "spaced"])
    assert labels_of(tmp_path / "spaced") == [[pos for _, pos, _ in rows] for rows in make_sentences()]
    assert (tmp_path / "spaced" / "valid.tokens.bin").read_bytes() == (data / "valid.tokens.bin").read_bytes()
    assert "raw_text" not in manifest_of(tmp_path / "spaced")
    packed = tmp_path / "dev.conllu.gz"
    packed.write_bytes(gzip.compress(write_conllu(source, make_sentences(), "X=y|SpaceAfter=No").read_bytes()))
    main([packed, packed, data / "tokenizer", tmp_path / "raw"])
    tokenizer = load_tokenizer(data / "tokenizer")
    texts = ["".join(word for word, _, _ in rows) for rows in make_sentences()]
    pieces = [ids.tolist() for ids in MMapIndexedDataset(str(tmp_path / "raw" / "valid.tokens"))]
    assert pieces == [tokenizer.ids_of(tokenizer.encode(text)) for text in texts]
    assert labels_of(tmp_path / "raw") == labels_of(tmp_path / "spaced")
    assert manifest_of(tmp_path / "raw")["raw_text"] is True


def test_few_labels_and_the_rest_without(data, tmp_path):
    """10 of 40 sentences at equal distances: each fourth; the others, or those of a file, have no labels."""
    source, out = data.parent / "train.txt", tmp_path / "rest"
    main([source, source, data / "tokenizer", out, "--labeled", 10, "--unlabeled", "rest"])
    everything = words_of(data, "train")
    assert words_of(out, "train") == everything[::4]
    assert words_of(out, "unlabeled") == [one for place, one in enumerate(everything) if place % 4]
    assert words_of(out, "valid") == everything
    assert not (out / "unlabeled.label.bin").exists()
    manifest = manifest_of(out)
    counts = {split: facts["sentences"] for split, facts in manifest["splits"].items()}
    assert counts == {"train": 10, "valid": 40, "unlabeled": 30}
    more = tmp_path / "more.txt"
    more.write_text("the house\nAnna sees the (grey) house\n", encoding="utf-8")
    main([source, source, data / "tokenizer", tmp_path / "file", "--unlabeled", more])
    assert words_of(tmp_path / "file", "unlabeled") == [["the", "house"], ["anna", "sees", "the", "(grey)", "house"]]
    assert words_of(tmp_path / "file", "train") == everything


def test_without_a_dev_file_some_are_held_out_first(data, tmp_path):
    """Of 40 sentences 8 or a few less, where some are equal; --labeled chooses from the others, and the rest is theirs."""
    source, tokenizer = data.parent / "train.txt", load_tokenizer(data / "tokenizer")
    folder = prepare_tagging_inside(tmp_path, WordSource(source, None, labeled=10, unlabeled="rest"), tokenizer)
    parts = [[tuple(words) for words in words_of(folder, split)] for split in ("train", "valid", "unlabeled")]
    train, dev, rest = parts
    assert len(train) == 10
    assert 6 <= len(dev) <= 8
    assert sorted(train + dev + rest) == sorted(map(tuple, words_of(data, "train")))
    assert not set(dev) & {*train, *rest}


def test_what_is_doubtful_is_said(data, tmp_path, capsys):
    """The share of the most frequent label, and dev sentences that train too."""
    sentences = make_sentences()
    dev = write_columns(tmp_path / "dev.txt", [[("Zoë", "ADV", "O")] * 3, *sentences[:1], [("Ada", "X", "O")]])
    train = write_columns(tmp_path / "train.txt", sentences)
    main([train, dev, data / "tokenizer", tmp_path / "out", *NAMES_OF_COLUMNS, "--column", "pos"])
    said = capsys.readouterr().err
    in_dev = ["ADV"] * 3 + [pos for _, pos, _ in sentences[0]] + ["X"]
    most = max(set(in_dev), key=in_dev.count)
    assert f"scored by accuracy ({most} is {in_dev.count(most) / len(in_dev):.1%} of the dev words)" in said
    seen = 1 + (sentences[0][0][0] == "Ada")
    assert f"{seen} of 3 dev sentences train too: the scores may be too high" in said
    assert Column.of(tmp_path / "out").seen == seen
    assert f"{train}: one word a line, column pos: 40 sentences of {sum(map(len, sentences))} words" in said


def test_refusals(data, tmp_path, capsys):
    """One line that names the file and what is wrong; nothing is left of OUT."""
    source, tokenizer, out = data.parent / "train.txt", data / "tokenizer", tmp_path / "out"
    same = write_columns(tmp_path / "same.txt", [[("a", "X", "O"), ("b", "X", "O")], [("b", "X", "B-Y")]])
    bilou = write_columns(tmp_path / "bilou.txt", [[("a", "X", "O"), ("b", "X", "U-Y")]])
    header = write_columns(tmp_path / "header.txt", [[("Wort", "Art", "Etikett"), ("b", "X", "B-Y")]])
    marks = write_columns(tmp_path / "marks.txt", [[("a", "X", "(PER*"), ("b", "X", "*)"), ("c", "X", "*")]] * 2)
    for train, dev, target, flags, message in (
        (marks, marks, out, ["--columns", "word,pos,ner"], "the label (PER* is a bracket of CoNLL-2012: convert"),
        (source, source, out, ["--column", "x"], "no column x: give --column with one of 2, label"),
        (
            source,
            source,
            out,
            ["--columns", "word,../x,y"],
            "--columns word,../x,y, --column None: give each name once",
        ),
        (bilou, header, out, [], "header.txt, line 1: the label 'Etikett' of the word 'Wort' marks no span, as the"),
        (same, same, out, ["--labeled", "1"], "all words that train have the label O: give another column, or more"),
        (source, source, out, ["--unlabeled", "rest"], "--unlabeled rest: --labeled N leaves no sentence of"),
    ):
        line = error_line(capsys, main, train, dev, tokenizer, target, *flags, reports_progress=True)
        assert message in line, flags
    assert not out.exists()
