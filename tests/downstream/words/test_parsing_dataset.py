"""Trees against all trees of four words, scores of a hand-made file, and a batch with words that are cut."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_models import small_dictionary

from amos_fairseq.downstream.words import parsing_command
from amos_fairseq.downstream.words.dataset import NO_LABEL, ParsedSentences
from amos_fairseq.downstream.words.parsing_command import (
    best_tree,
    chains,
    is_tree,
    tree_scores,
    with_cut_words,
    with_trees,
)
from amos_fairseq.inputs.word_files import read_conllu
from amos_fairseq.text.encoding import BinarizedFile

OFFICIAL_SCRIPT = os.environ.get("CONLL18_UD_EVAL", "")
# Every case that the official evaluation treats on its own: a range of a multiword token, an empty node, subtypes, punctuation,
# a comment, a space inside of a word, a sentence of one word.
GOLD = """\
# text = It's a New York dog.
1-2\tIt's\t_\t_\t_\t_\t_\t_\t_\t_
1\tIt\tit\tPRON\t_\t_\t5\tnsubj\t_\t_
2\t's\tbe\tAUX\t_\t_\t5\tcop\t_\t_
2.1\tnot\tnot\tPART\t_\t_\t_\t_\t5:advmod\t_
3\ta\ta\tDET\t_\t_\t5\tdet\t_\t_
4\tNew York\tNew York\tPROPN\t_\t_\t5\tnmod:poss\t_\t_
5\tdog\tdog\tNOUN\t_\t_\t0\troot\t_\tSpaceAfter=No
6\t.\t.\tPUNCT\t_\t_\t5\tpunct\t_\tSpaceAfter=No

1\tYes\tyes\tINTJ\t_\t_\t0\troot\t_\t_

"""
# it: right head, wrong relation; 's: wrong head; New York: another subtype; the full stop: wrong.
TREES = [[(5, "obj"), (1, "cop"), (5, "det"), (5, "nmod:of"), (0, "root"), (1, "punct")], [(0, "root")]]


def edges(path: Path) -> list[list[tuple[int, str]]]:
    columns = [one.columns for one in read_conllu(path).sentences]
    return [list(zip(map(int, own["head"]), own["deprel"], strict=True)) for own in columns]


def test_scores_by_hand(tmp_path: Path):
    """Of seven words five have the right head, four of them the right relation; without the full stop five of six, four."""
    (tmp_path / "gold.conllu").write_text(GOLD, encoding="utf-8")
    (tmp_path / "found.conllu").write_text(with_trees(GOLD, TREES), encoding="utf-8")
    gold, found = edges(tmp_path / "gold.conllu"), edges(tmp_path / "found.conllu")
    assert found == TREES
    scores = tree_scores(gold, found)
    expected = {"uas": 5 / 7, "las": 4 / 7, "uas_no_punctuation": 5 / 6, "las_no_punctuation": 4 / 6}
    assert scores == {name: pytest.approx(100 * value) for name, value in expected.items()}
    # Nothing but these columns, the enhanced dependencies and their empty nodes changes.
    plain = "".join(line for line in GOLD.splitlines(keepends=True) if not line.startswith("2.1"))
    assert with_trees(GOLD, gold) == with_trees(GOLD.replace("5:advmod", "0:x"), gold) == plain
    odd = plain.replace("It\tit", "I\u2028t\x85\tit").replace("SpaceAfter=No", "x\x0c")
    assert with_trees(odd, gold) == odd
    assert with_trees("1\ta\t_\t_\t_\t_\t0\troot\t0:root\t_\n", [[(0, "root")]]).split("\t")[8] == "_"
    assert with_cut_words([(2, "nsubj"), (0, "root")], 4) == [(2, "nsubj"), (0, "root"), (2, "dep"), (2, "dep")]
    assert with_cut_words([], 3) == [(0, "root"), (1, "dep"), (1, "dep")]


@pytest.mark.skipif(not OFFICIAL_SCRIPT, reason="CONLL18_UD_EVAL is not the path of conll18_ud_eval.py")
def test_scores_of_cut_words_are_those_of_the_official_script(tmp_path: Path):
    """Random trees beside others, of which the words at the end are cut, in files with multiword tokens and empty nodes."""
    generator, every = np.random.default_rng(1), {}
    for length in range(1, 6):
        trees = itertools.product(range(length + 1), repeat=length)
        every[length] = [heads for heads in trees if is_tree(heads)]

    def tree(length: int) -> list[tuple[int, str]]:
        heads = every[length][generator.integers(len(every[length]))]
        return [(head, "det" if generator.random() < 0.5 else "obl:tmod") for head in heads]

    words = [[f"{n}\tw{n}\t_\t_\t_\t_\t_\t_\t_\t_\n" for n in range(1, length + 1)] for length in range(1, 6)] * 8
    text = "".join("".join(sentence) + "\n" for sentence in words) + GOLD
    lengths = [*map(len, words), 6, 1]
    gold = [tree(len(sentence)) for sentence in words] + [TREES[0], TREES[1]]
    kept = [length - int(generator.integers(length)) for length in lengths]
    found = [with_cut_words(tree(min(number, 5)), length) for number, length in zip(kept, lengths, strict=True)]
    for name, own in (("gold", gold), ("found", found)):
        (tmp_path / name).write_text(with_trees(text, own), encoding="utf-8")
    command = [sys.executable, OFFICIAL_SCRIPT, "-c", str(tmp_path / "gold"), str(tmp_path / "found")]
    rows = (line.split("|") for line in subprocess.check_output(command, text=True).splitlines())
    official = {row[0].strip().lower(): row[1:3] for row in rows}
    scores = tree_scores(gold, found)
    for name in ("uas", "las"):
        right, total = map(int, official[name])
        assert scores[name] == pytest.approx(100 * right / total)
    assert 0 < scores["las"] < scores["uas"] < 100


def test_chains_of_words_by_hand():
    """Two of five heads are the previous word, three the next one; one of these has the right relation, ``det``.

    In training it is the most frequent one, with its subtypes, of words whose head is the next one. Punctuation,
    roots and heads further away do not count."""
    gold = [[(2, "det"), (3, "amod"), (0, "root"), (3, "punct")], [(0, "root")]]
    train = [
        [(2, "amod"), (3, "amod"), (4, "det"), (0, "root"), (4, "obj"), (5, "punct"), (6, "punct")],
        [(2, "det:predet"), (0, "root"), (4, "punct"), (5, "punct"), (6, "punct"), (2, "advmod")],
        [(2, "det:predet"), (0, "root"), (1, "advmod"), (1, "advmod"), (1, "advmod")],
        *[[(0, "root")]] * 9,
    ]
    found = chains(train, [4, 1])
    assert list(found) == ["the previous word as head (obj)", "the next word as head (det)"]
    previous, following = found.values()
    assert previous == [[(0, "obj"), (1, "obj"), (2, "obj"), (3, "obj")], [(0, "obj")]]
    assert following == [[(2, "det"), (3, "det"), (4, "det"), (0, "det")], [(0, "det")]]
    assert all(is_tree([head for head, _ in tree]) for tree in previous + following)
    assert list(chains([[(0, "root")]], [1])) == ["the previous word as head (dep)", "the next word as head (dep)"]
    found = {name.split()[1]: tree_scores(gold, trees) for name, trees in found.items()}
    assert [found["previous"][score] for score in ("uas", "las")] == [40, 0]
    assert [found["next"][score] for score in ("uas", "las")] == [60, 20]


def test_trees_by_hand():
    for heads, expected in (
        ([0], True),
        ([2, 0], True),
        ([0, 1, 2], True),
        ([0, 0], False),  # two roots
        ([2, 1], False),  # no root
        ([0, 3, 2], False),  # a cycle beside the root
        ([0, 4], False),  # no such word
    ):
        assert is_tree(heads) is expected


@pytest.mark.parametrize("likely", [1, 2, 4])
def test_the_best_tree_is_that_of_all_trees(likely: int, monkeypatch: pytest.MonkeyPatch):
    """Random scores of four words; greedy choices are trees now and then. With few likely heads a second search is needed."""
    monkeypatch.setattr(parsing_command, "LIKELY_HEADS", likely)
    generator, greedy = np.random.default_rng(1), 0
    every = [np.array(heads) for heads in itertools.product(range(5), repeat=4) if is_tree(heads)]
    for _ in range(60):
        scores = generator.normal(size=(4, 5)) * 3
        scores[np.arange(4), np.arange(1, 5)] = -np.inf  # a word is not its own head
        scores[:, 0] += 2  # of several roots
        sums = [scores[np.arange(4), heads].sum() for heads in every]
        np.testing.assert_array_equal(best_tree(scores), every[int(np.argmax(sums))])
        greedy += is_tree(scores.argmax(1))
    assert 0 < greedy < 60


def test_a_batch_with_words_that_are_cut(tmp_path: Path):
    """Three tokens fit: two words of the first sentence, whose root is cut, and none of the second."""
    dictionary = small_dictionary()
    rows = {"tokens": [[5, 6, 7], [5, 6, 7, 8]], "word_start": [[0, 1, 2], [0, 3]], "word_end": [[1, 2, 3], [3, 4]]}
    rows |= {"label": [[1, 0, 2], [2, 0]], "head": [[2, 3, 0], [0, 1]]}
    for name, own in rows.items():
        with BinarizedFile(f"{tmp_path}/valid.{name}", len(dictionary) if name == "tokens" else None) as file:
            for row in own:
                file.add_line(row)
    (tmp_path / "tagging.json").write_text("{}")
    sentences = ParsedSentences(tmp_path, "valid", 3, max_tokens=4)
    batch = sentences.collater([sentences[0], sentences[1]])
    # The first word depends on the second: 2 * 3 + 1. The head of the second is cut.
    assert batch["target"].tolist() == [[7, NO_LABEL], [NO_LABEL, NO_LABEL]]
    assert (batch["nwords"], batch["all_words"]) == (1, 5)
    assert batch["net_input"]["word_positions"].tolist() == [[1, 2], [0, 0]]
    whole = ParsedSentences(tmp_path, "valid", 3, max_tokens=9)
    assert whole.collater([whole[0]])["target"].tolist() == [[2 * 3 + 1, 3 * 3, 2]]
