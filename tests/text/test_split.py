"""The split of a corpus against naive sorting: every document once, in the same part for any order of the input."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from synthetic_corpus import make_documents, write_text

from amos_fairseq.errors import UserError
from amos_fairseq.text import split as text_split
from amos_fairseq.text.split import SAMPLE, VALID, CorpusSettings, SmallestHashes, group_into_shards, split_corpus

DOCUMENTS = make_documents(300)
SETTINGS = CorpusSettings(seed=1, shard_bytes=16 * 2000, valid_share=0.1, valid_bytes=10_000, sample_bytes=30_000)


def read_piece(path: Path) -> list:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n\n")
    return [tuple(document.split("\n")) for document in text[:-2].split("\n\n")]


def run(tmp_path: Path, documents, settings=SETTINGS, files=1):
    """Split documents of several files; return the split and the documents of each file of training text, and of the others."""
    size = -(-len(documents) // files)
    paths = [write_text(tmp_path / f"in{i}.txt", documents[i * size : (i + 1) * size]) for i in range(files)]
    directory = tmp_path / "split"
    directory.mkdir()
    split = split_corpus(paths, directory, settings, lambda size: None)
    train = [read_piece(path) for path in sorted(directory.glob("0*.txt"))]
    return split, train, read_piece(directory / VALID), read_piece(directory / SAMPLE)


def text_bytes(documents) -> int:
    return sum(len(paragraph.encode("utf-8")) + 1 for document in documents for paragraph in document)


@pytest.mark.parametrize("budget", [0, 1, 50, 400, 10**6])
def test_smallest_hashes_against_sorting(budget):
    """The largest set of smallest keys that fits, with all copies; each other document is returned exactly once."""
    generator = random.Random(budget)
    texts = [bytes([key]) * generator.randrange(1, 30) for key in range(40)]
    offered = [generator.randrange(40) for _ in range(200)]
    choice = SmallestHashes(budget)
    refused: Counter[bytes] = Counter()
    for key in offered:
        for document, number in choice.add(key, texts[key]):
            refused[document] += number
    keys = sorted(set(offered))
    fitting = [last for last in keys if sum(len(texts[key]) for key in offered if key <= last) <= budget]
    expected = Counter(texts[key] for key in sorted(offered) if key <= max(fitting, default=keys[0]))
    assert list(choice.in_order().items()) == list(expected.items())
    assert refused == Counter(texts[key] for key in offered) - expected


@pytest.mark.parametrize("valid_bytes", [10_000, 2_000, 1])
def test_every_document_is_in_one_part(tmp_path, monkeypatch, valid_bytes):
    monkeypatch.setattr(text_split, "FILE_BYTES", 700)
    settings = CorpusSettings(**{**vars(SETTINGS), "valid_bytes": valid_bytes})
    split, files, valid, sample = run(tmp_path, DOCUMENTS, settings, files=3)
    train = [document for file in files for document in file]
    assert Counter(train) + Counter(valid) == Counter(DOCUMENTS)
    assert not set(train) & set(valid)
    assert not set(sample) & set(valid)
    assert set(sample) <= set(train)
    assert len(valid) >= 1
    assert text_bytes(valid) <= max(min(valid_bytes, 0.1 * text_bytes(DOCUMENTS)), text_bytes(valid[:1]))
    assert text_bytes(sample) <= settings.sample_bytes
    assert [text_bytes(file) for file in files] == [size for group in split.train for size in group]
    assert all(sum(group) <= 2000 for group in split.train)
    assert all(text_bytes(file) <= 700 or len(file) == 1 for file in files)
    counts = {"documents": len(sample), "paragraphs": sum(map(len, sample)), "bytes": text_bytes(sample)}
    assert split.sample == {"name": SAMPLE, **counts}
    assert sum(counts["documents"] for counts in split.inputs) == len(DOCUMENTS)


def test_split_depends_on_content_and_seed_only(tmp_path):
    """Another order or other files give the same validation documents and sample; another seed gives others."""
    shuffled = random.Random(2).sample(DOCUMENTS, len(DOCUMENTS))
    parts = {}
    for name, documents, files, seed in (("a", DOCUMENTS, 1, 1), ("b", shuffled, 4, 1), ("c", DOCUMENTS, 1, 2)):
        (tmp_path / name).mkdir()
        settings = CorpusSettings(**{**vars(SETTINGS), "seed": seed})
        _, _, valid, sample = run(tmp_path / name, documents, settings, files)
        parts[name] = (valid, sample)
    assert parts["a"] == parts["b"]
    assert parts["a"][0] != parts["c"][0]
    assert parts["a"][1] != parts["c"][1]


def test_a_text_must_leave_a_validation_document(tmp_path):
    """A copy is not a second document."""
    with pytest.raises(UserError, match=r"nothing would be left to train on .*, or --document line"):
        run(tmp_path, [("one document",)] * 2)
    (tmp_path / "two").mkdir()
    _, (train,), valid, _ = run(tmp_path / "two", [("one",), ("two",)])
    assert len(train) == len(valid) == 1


def test_a_large_document_is_split_at_a_paragraph(tmp_path, capsys):
    """Two texts of 200 paragraphs: the first paragraphs of one are held out, 1 % of the bytes, and the rest trains."""
    texts = [tuple(f"paragraph {number} of {name}" for number in range(200)) for name in ("one", "two")]
    settings = CorpusSettings(**{**vars(SETTINGS), "valid_share": 0.01})
    _, files, valid, sample = run(tmp_path, texts, settings)
    train = [document for file in files for document in file]
    assert len(valid) == 1
    assert sorted([*train, valid[0]], key=len)[0] == valid[0]
    rest = next(document for document in train if len(document) < 200)
    assert valid[0] + rest in texts
    assert 0.01 <= text_bytes(valid) / text_bytes(texts) <= 0.0125
    assert Counter(sample) == Counter(train), "the vocabulary is not learned from what is held out"
    assert re.search(r"validation: \d+ bytes, 1\.\d\d% of the text \(asked for: 1\.00%", capsys.readouterr().err)


A, B, C, D = b"a" * 9 + b"\n", b"b\n" * 30, b"c" * 59 + b"\n", b"d\n" * 5
HELD_OUT = [
    # candidates, budget, what is held out
    ([A, D], 10, {A: A}),
    ([A, D], 20, {A: A, D: D}),
    ([A, A, D], 10, {A: A}),  # with its copies
    ([B, A], 30, {B: B}),  # twice the budget
    ([B, A], 29, {B: b"b\n" * 15}),
    ([B, A], 1, {B: b"b\n"}),
    ([B, A, B, B], 10, {A: A}),  # many copies are passed over
    ([C, A, D], 5, {A: A}),  # and one very large paragraph
    ([C, A, D], 10, {C: C}),
    ([B, B], 20, {B: b"b\n" * 5}),  # where there is no other
    ([C], 10, {C: C}),
    ([A, B, D], 20, {A: A, B: b"b\n" * 5}),  # a large one fills what is left
    ([A, C, D], 25, {A: A}),  # the first that does not fit ends it
    ([A, D, D, D, D], 20, {A: A}),  # copies have to fit together
]


@pytest.mark.parametrize(("candidates", "budget", "expected"), HELD_OUT)
def test_what_is_held_out(candidates, budget, expected):
    assert text_split.held_out(Counter(candidates), budget) == expected


@pytest.mark.parametrize("seed", range(20))
def test_shards_are_consecutive_and_of_similar_size(seed):
    generator = random.Random(seed)
    limit = 160
    sizes = [generator.randint(5, 10) for _ in range(generator.randint(1, 200))]
    groups = group_into_shards(sizes, limit)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in group) for group in groups]
    assert max(sums) <= limit
    assert max(sums) - min(sums) <= 2 * max(sizes)
    assert len(groups) <= -(-sum(sizes) // limit) + 1
    assert group_into_shards([5, 500, 5], 100) == [[0], [1], [2]], "a document larger than a shard is not split"
