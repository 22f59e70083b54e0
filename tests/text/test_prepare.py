"""amos prepare: its command line, what amos prepare text writes for any number of processes, and what it says is lost."""

import json
import logging
import random
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import synthetic_corpus
from fairseq import options
from fairseq.data import Dictionary
from fairseq_cli import preprocess
from hugging_face_folders import train_wordpiece
from preparing import prepare
from synthetic_corpus import DOCUMENTS, encode_naively, file_bytes, make_task, read_binarized, shard_directories
from tiny_runs import ROOT
from tokenizer_text import word_level_directory

from amos_fairseq.cli.main import build_parser
from amos_fairseq.cli.prepare import with_kind
from amos_fairseq.data.corpus import add_tokenizer
from amos_fairseq.downstream.texts.prepare import write_tables
from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256
from amos_fairseq.inputs.rows import Tables
from amos_fairseq.recipes import packaged_costs
from amos_fairseq.text import split as text_split
from amos_fairseq.text.encoding import END_ID, encode_documents, start_encoding_process
from amos_fairseq.text.prepare import RECOMMENDED, describe_recommended
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

main = prepare("text")
ABC = ["a", "b", "c"]
EVENTS = [f"E{number:03}" for number in range(66)]


def test_ids_are_those_of_a_naive_encoding(corpus):
    """Every document once, whole, in order of paragraphs; training and validation share none."""
    out, _ = corpus
    shards = shard_directories(out)
    train = [document for shard in shards for document in read_binarized(shard / "train")]
    valid = read_binarized(shards[0] / "valid")
    assert Counter(train) + Counter(valid) == encode_naively(out, DOCUMENTS)
    assert not set(train) & set(valid)


def test_layout(corpus, inputs):
    """Which files there are, and what corpus.json says of them."""
    out, _ = corpus
    manifest = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    shards = shard_directories(out)
    assert len(shards) >= 3
    dictionary = (out / "tokenizer" / "dict.txt").read_bytes()
    expected = {"corpus.json", "tokenizer/dict.txt", "tokenizer/tokenizer.settings.json"}
    expected.add(f"tokenizer/{load_tokenizer(out / 'tokenizer').model_file}")
    for number, shard in enumerate(shards):
        assert (shard / "dict.txt").read_bytes() == dictionary
        names = ["dict.txt", "train.bin", "train.idx"] + (["valid.bin", "valid.idx"] if number == 0 else [])
        expected |= {f"shard{number}/{name}" for name in names}
    assert set(file_bytes(out)) == expected
    assert manifest["task_data"] == ":".join(map(str, shards))
    assert manifest["tokenizer"]["sha256"] == load_tokenizer(out / "tokenizer").sha256
    assert [record["sha256"] for record in manifest["inputs"]] == [file_sha256(path) for path in inputs]
    train = [read_binarized(shard / "train") for shard in shards]
    for record, shard, documents in zip(manifest["shards"], shards, train, strict=True):
        lines = [line for document in documents for line in document]
        assert record["train"]["documents"] == len(documents)
        assert record["train"]["paragraphs"] == len(lines)
        assert record["train"]["tokens"] == sum(map(len, lines)) + len(documents) - 1
        assert record["train"]["unknown"] == sum(line.count(3) for line in lines)
        assert record["sha256"] == {path.name: file_sha256(path) for path in shard.glob("*.[bi][id][nx]")}
    everything = {name: manifest["train"][name] + manifest["valid"][name] for name in manifest["valid"]}
    paragraphs = [paragraph for document in DOCUMENTS for paragraph in document]
    assert everything["documents"] == len(DOCUMENTS)
    assert everything["paragraphs"] == len(paragraphs)
    assert everything["words"] == sum(len(paragraph.split()) for paragraph in paragraphs)
    assert everything["bytes"] == sum(len(paragraph.encode("utf-8")) + 1 for paragraph in paragraphs)
    assert max(shard["train"]["bytes"] for shard in manifest["shards"]) <= manifest["settings"]["shard_bytes"]


def test_a_document_a_line(tmp_path, capsys):
    """Two files of text, and a table, whose rows are documents in any case. What was read is printed before the work."""
    lines = [paragraph for document in DOCUMENTS for paragraph in document]
    for name, part in (("one.txt", lines[:300]), ("two.txt", lines[300:])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
    rows = [{"text": "one more"}, {"text": None}, {"id": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [tmp_path / name for name in ("one.txt", "two.txt", "rows.jsonl")]
    main([*inputs, "--document", "line", "--vocab-size", "200", "--workers", "1", "--out", tmp_path / "out"])
    error = capsys.readouterr().err
    assert error.startswith(
        f"prepare: {inputs[0]}: plain text, a document a line\nprepare: {inputs[0]}: the first: {lines[0]}\n"
    )
    assert f"prepare: {inputs[2]}: 1 documents; left out: 2 without a text in text\n" in error
    assert f"{len(lines) + 1:,} documents of {len(lines) + 1:,} paragraphs" in error
    manifest = json.loads((tmp_path / "out" / "corpus.json").read_text(encoding="utf-8"))
    assert f"validate; {describe_recommended(manifest['train']['tokens'])}\n" in error
    found = [[record[name] for name in ("documents", "without_text")] for record in manifest["inputs"]]
    assert found == [[300, 0], [len(lines) - 300, 0], [1, 2]]
    assert 0.005 <= manifest["valid"]["bytes"] / (manifest["valid"]["bytes"] + manifest["train"]["bytes"]) <= 0.01


def test_the_recommended_recipes_are_those_of_the_page():
    costs, page = packaged_costs(), (ROOT / "docs/start.md").read_text(encoding="utf-8")
    for _, recipe, num_read in RECOMMENDED:
        name, _, updates = recipe.partition(" optimization.max_update=")
        assert num_read * costs[name]["max_update"] == costs[name]["tokens"] * int(updates or costs[name]["max_update"])
        assert f"`{name}`" in page
        assert not updates or f"`optimization.max_update={updates}`" in page
    short = "amos train mlm_modern_mini optimization.max_update=4000 reads them 1.2 times"
    assert describe_recommended(14_000_000) == short
    assert describe_recommended(10**9) == "amos train electra_small reads them 16 times"


def test_same_bytes_for_two_processes(corpus, tmp_path, monkeypatch):
    """Also when the text of a group is in several files."""
    out, flags = corpus
    monkeypatch.setattr(text_split, "FILE_BYTES", 600)
    main([*flags, "--out", tmp_path / "again", "--workers", "2"])
    assert file_bytes(tmp_path / "again") == file_bytes(out)


def test_finished_corpus_is_unchanged(corpus, inputs, capsys, refused):
    out, flags = corpus
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    main([*flags, "--out", out])
    assert "finished already" in capsys.readouterr().err
    for changed in ([*flags, "--vocab-size", "201"], [*flags, "--uncased"], [inputs[0], *flags[2:]]):
        assert "is not empty, and was not made of these inputs and settings: give another" in refused(
            *changed, "--out", out
        )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_existing_tokenizer(corpus, inputs, tmp_path):
    """The tokenizer of one corpus binarizes another text."""
    out, _ = corpus
    other = tmp_path / "other"
    main([inputs[1], "--out", other, "--tokenizer", out / "tokenizer", "--workers", "1"])
    assert (other / "dict.txt").read_bytes() == (out / "tokenizer" / "dict.txt").read_bytes()
    found = read_binarized(other / "train") + read_binarized(other / "valid")
    assert Counter(found) == encode_naively(out, DOCUMENTS[len(DOCUMENTS) // 3 :])


def test_hugging_face_tokenizer(inputs, tmp_path):
    """A bare tokenizer.json: the ids, mapped back, are those that the library gives to every paragraph."""
    library = train_wordpiece(tmp_path / "given", [p for document in DOCUMENTS for p in document])
    out = tmp_path / "corpus"
    main([*inputs, "--out", out, "--tokenizer", tmp_path / "given", "--workers", "1"])
    ids = load_tokenizer(out / "tokenizer").hugging_face_ids
    dictionary = Dictionary.load(str(out / "dict.txt"))
    found = read_binarized(out / "train") + read_binarized(out / "valid")
    back = Counter(tuple(ids[dictionary[index]] for index in line[:-1]) for document in found for line in document)
    expected = (library.encode(p, add_special_tokens=False).ids for document in DOCUMENTS for p in document)
    assert back == Counter(map(tuple, expected))


def test_protected_tokens_are_kept_in_the_corpus(tmp_path, capsys, refused):
    """Each marker that the text spells is one token, which training counts among its special ones; the flag is a setting."""
    marked = [tuple(f"[E1] {paragraph}" for paragraph in document) for document in DOCUMENTS[:60]]
    source = synthetic_corpus.write_text(tmp_path / "text.txt", marked)
    flags = [source, "--out", tmp_path / "out", "--vocab-size", "150"]
    main([*flags, "--protect", "[E1]", "--protect", "[e1]", "--workers", "1"])
    printed = capsys.readouterr().err
    assert "never masked, sampled or predicted: [E1] [e1]\n" in printed
    assert "--protect: the text never has [e1]: compare" in printed
    assert "was not made of these inputs and settings" in refused(*flags)
    task = make_task(tmp_path / "out")
    marker = task.dictionary.index("[E1]")
    assert task.special_ids == [0, 1, 2, 3, marker, marker + 1, marker + 2]
    lines = [line for document in read_binarized(tmp_path / "out" / "train") for line in document]
    assert lines
    assert all(line[0] == marker and line.count(marker) == 1 for line in lines)


def test_paragraphs_of_invisible_characters_are_dropped(corpus):
    """An empty line would end the document."""
    start_encoding_process(corpus[0] / "tokenizer")
    ids, lengths, counts = encode_documents("ba ke\n\u200b\u3000\nli\n\n\u3000\n\nmo\n\n")
    ends = [length == 1 for length in lengths]
    assert ends == [False, False, True, False], "two paragraphs, the end of a document, one paragraph"
    assert ids.count(END_ID) == 4
    assert (counts["documents"], counts["paragraphs"], counts["tokens"]) == (2, 3, len(ids))


def test_bytes_are_those_of_fairseq_preprocess(corpus, inputs, tmp_path, monkeypatch):
    """The command of fairseq, on lines of pieces that are written here, with the corpus' own dictionary."""
    out, _ = corpus
    shard = shard_directories(out)[0]
    dictionary = Dictionary.load(str(shard / "dict.txt"))
    for split in ("train", "valid"):
        documents = read_binarized(shard / split)
        text = "\n".join("".join(" ".join(dictionary[i] for i in line[:-1]) + "\n" for line in d) for d in documents)
        (tmp_path / split).write_text(text, encoding="utf-8")
    files = ["--trainpref", str(tmp_path / "train"), "--validpref", str(tmp_path / "valid")]
    flags = ["--only-source", "--srcdict", str(out / "tokenizer" / "dict.txt"), "--destdir", str(tmp_path / "fairseq")]
    monkeypatch.setattr(logging.getLogger("fairseq_cli.preprocess"), "handlers", [])
    preprocess.main(options.get_preprocessing_parser().parse_args([*files, *flags, "--workers", "1"]))
    written = {path.name: path.read_bytes() for path in (tmp_path / "fairseq").iterdir() if path.suffix != ".log"}
    assert written == {path.name: path.read_bytes() for path in shard.iterdir()}
    folder, given = [tmp_path / "fairseq"], tmp_path / "given"
    train_wordpiece(given, [paragraph for document in DOCUMENTS for paragraph in document])
    learn_tokenizer(inputs[0], 140, True).save(tmp_path / "similar")  # most pieces are the same
    for wrong in (given, tmp_path / "similar"):
        with pytest.raises(UserError, match=r"lines of the text .*: give the tokenizer that encoded this text"):
            add_tokenizer(folder, wrong)
    assert not (folder[0] / "tokenizer").exists()
    assert re.match(
        r"(.*) of the \1 symbols .* and (.*) of \2 lines of the text", add_tokenizer(folder, out / "tokenizer")
    )
    sentence = DOCUMENTS[0][0]
    assert load_tokenizer(folder[0] / "tokenizer").encode(sentence) == load_tokenizer(out / "tokenizer").encode(
        sentence
    )
    with pytest.raises(UserError, match="the corpus has its tokenizer"):
        add_tokenizer(folder, given)


@pytest.mark.parametrize(
    ("arguments", "kind", "values"),
    [
        (["my.txt", "--out", "D"], "text", {"text": [Path("my.txt")], "out": Path("D")}),
        (["text", "text", "--out", "D"], "text", {"text": [Path("text")]}),
        (["./glue", "--out", "D"], "text", {"text": [Path("glue")]}),
        (["glue", *ABC, "D"], "glue", {"tasks": "b", "out": Path("D")}),
        (["squad", "--out", "D", *ABC], "squad", {"dev": Path("b"), "out": Path("D")}),
        (["probing", "D", "--chunks", "a", "b"], "probing", {"chunks": [Path("a"), Path("b")], "out": Path("D")}),
    ],
)
def test_the_first_word_is_a_kind_if_it_is_the_name_of_one(tmp_path, monkeypatch, arguments, kind, values):
    """Also where files have these names."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "glue"):
        Path(name).touch()
    given = build_parser().parse_args(with_kind(["prepare", *arguments]))
    assert given.kind == kind
    given.out = Path(given.out)
    assert {name: getattr(given, name) for name in values} == values


def documents(words, number=80, length=20):
    draw = random.Random(3)
    return [" ".join(draw.choices(words, k=length)) for _ in range(number)]


def test_unknown_words(tmp_path, capsys, monkeypatch):
    """A tokenizer of 60 of 66 events, of which each is a piece. The command that is printed is quoted for the shell."""
    monkeypatch.setattr("amos_fairseq.text.tokenization.conversion.LARGEST_LOSS", 1.0)
    tokenizer, out = word_level_directory(tmp_path / "words", EVENTS[:60]), tmp_path / "a b's #1"
    (tmp_path / "text.txt").write_text("\n\n".join(documents(EVENTS)), encoding="utf-8")
    main([tmp_path / "text.txt", "--out", out, "--workers", "1", "--tokenizer", tokenizer])
    printed = capsys.readouterr().err
    (command,) = re.findall(r"train with (.*) \(fairseq-train DATA\)", printed)
    assert shlex.split(command) == [f"task.data={out}"]
    record = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    total = sum(record[split]["unknown"] for split in ("train", "valid"))
    assert total == sum(word in EVENTS[60:] for text in documents(EVENTS) for word in text.split())
    (share,) = re.findall(r"([\d.]+)% of the pieces unknown .*WARNING: this tokenizer does not fit the text", printed)
    assert float(share) == pytest.approx(100 * record["train"]["unknown"] / record["train"]["words"], abs=1e-3)
    assert float(share) > 5


def test_what_a_tokenizer_lacks_is_said(tmp_path, capsys, monkeypatch):
    """A BPE of letters, which leaves the others out, and whose special tokens were added later."""
    monkeypatch.setattr("amos_fairseq.text.tokenization.conversion.LARGEST_LOSS", 1.0)
    added = ["[PAD]", "[CLS]", "[SEP]"]
    folder = word_level_directory(tmp_path / "bpe", [*"abcdefghi"], absent=["[UNK]"], added=added)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"] = {"type": "BPE", "vocab": content["model"]["vocab"], "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "text.txt").write_text("abcx def\n\nabx ghi", encoding="utf-8")
    main([tmp_path / "text.txt", "--out", tmp_path / "out", "--workers", "1", "--tokenizer", folder])
    printed = capsys.readouterr().err
    assert "has no unknown token: it leaves out each character that its vocabulary lacks" in printed
    assert f"WARNING: amos export will refuse models with {folder}: the padding token [PAD] was added" in printed


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
        write_tables(out, Tables(file, file).check(), load_tokenizer(tokenizer), {})
    else:
        answer = {"text": "fox", "answer_start": 4}
        questions = [{"id": "1", "question": "the fox hare " * 3, "answers": [answer], "is_impossible": False}]
        paragraphs = [{"context": "the fox owl " * 3, "qas": questions}]
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
        file.write_text(json.dumps(content))
        prepare(kind)([file, file, tokenizer, out])
    printed = capsys.readouterr().err
    assert printed.count("33.333% of the pieces unknown (6): WARNING:") == 2
    words, target = {
        "tagging": ("the fox <unk> </s>", "DET NOUN NOUN"),
        "classify": ("the fox <unk> </s>", "a"),
        "squad": (f"{'the fox <unk> ' * 3}</s> {'the fox <unk> ' * 3}</s>", "fox"),
    }[kind]
    assert f"the first example to train on, in tokens: <s> {words} -> {target}\n" in printed


def test_rows_that_a_tokenizer_does_not_know(tmp_path):
    """Six of 100 rows have no known piece; a row without text is none of them."""
    tokenizer, file = word_level_directory(tmp_path / "words", ["the", "fox", "dog"]), tmp_path / "data.tsv"
    file.write_text("text\tlabel\n" + "the hare\ta\nfox\tb\n" * 47 + "hare owl\ta\n" * 6)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="the tokenizer knows no piece of 6 of 100 rows: start from a checkpoint with"):
        write_tables(tmp_path / "out", Tables(file, file).check(), load_tokenizer(tokenizer), {})
