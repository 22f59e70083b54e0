"""``amos parse`` end to end: a small model learns the trees of a small grammar; files, another process, and refusals."""

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from failures import error_line
from fine_tuning_tasks import fine_tune, write_recipe
from interrupted_run import records
from synthetic_squad import untrained_checkpoint
from tiny_runs import run_of

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.words.command import encode_sentences
from amos_fairseq.inputs.word_files import read_conllu
from amos_fairseq.text.vocabulary import learn_tokenizer

pytestmark = pytest.mark.slow


def write_treebank(path: Path, count: int, seed: int) -> None:
    """the ADJ* NOUN sees the ADJ* NOUN [.]: determiners and adjectives depend on their noun, nouns on the verb."""
    generator, lines = random.Random(seed), []
    for _ in range(count):
        words: list[tuple[str, int, str]] = []  # the number of the head is known later

        def phrase(relation: str, words: list = words) -> None:
            adjectives = generator.choices(["old", "green", "very-unusual"], k=generator.randint(0, 2))
            noun = len(words) + 1 + len(adjectives) + 1
            words.append(("the", noun, "det"))
            words.extend((adjective, noun, "amod") for adjective in adjectives)
            words.append((generator.choice(["house", "dog"]), -1, relation))

        phrase("nsubj")
        verb = len(words) + 1
        words.append(("sees", 0, "root"))
        phrase("obj:any")
        words += [(".", -1, "punct")] * generator.randint(0, 1)
        for number, (word, head, relation) in enumerate(words, start=1):
            misc = "SpaceAfter=No" if [row[0] for row in words[number : number + 1]] == ["."] else "_"
            lines.append("\t".join([str(number), word, *"____", str(verb if head < 0 else head), relation, "_", misc]))
        lines.append("")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("parse")
    write_treebank(place / "train.conllu", 60, 1)
    write_treebank(place / "dev.conllu", 20, 2)
    text = "\n".join(" ".join(one.words) for one in read_conllu(place / "train.conllu").sentences)
    (place / "text.txt").write_text(text, encoding="utf-8")
    learn_tokenizer(place / "text.txt", 120, cased=False).save(place / "data" / "tokenizer")
    untrained_checkpoint(place / "start", place / "data", 40)
    write_recipe(place, "tagging", epochs=12, checkpoint="best")
    return place


def treebanks(place: Path) -> list[object]:
    return ["--train", place / "train.conllu", "--dev", place / "dev.conllu"]


def test_trees_of_a_grammar_are_learned(place, tmp_path, capsys):
    fine_tune("parse", place, place / "out", *treebanks(place))
    scores = json.loads((place / "out" / "parsing.json").read_text())["tasks"]["parsing"]["scores"]
    assert scores["las"]["median"] > 95, scores
    assert scores["uas"]["median"] >= scores["las"]["median"]
    table = (place / "out" / "parsing.md").read_text()
    assert "the previous word as head (dep)" in table, "no word but punctuation has such a head"
    assert "the next word as head (amod)" in table
    run = run_of(place / "out", "parsing")
    checkpoint, predictions, labels = run / "checkpoint_best.pt", run / "predictions.conllu", tmp_path / "labels"
    gold, found = (read_conllu(file).sentences for file in (place / "dev.conllu", predictions))
    assert [sentence.words for sentence in found] == [sentence.words for sentence in gold]
    heads = [[head for sentence in sentences for head in sentence.columns["head"]] for sentences in (found, gold)]
    share = sum(map(str.__eq__, *heads)) / len(heads[0])
    assert 100 * share == pytest.approx(scores["uas"]["median"])
    assert records(run)[-1]["las"] > 90
    assert amos_fairseq.load(checkpoint)(["the dog"]).pooled().shape == (1, 64)
    # Without the prepared data: the checkpoint says how the words were joined.
    shutil.copytree(place / "out", tmp_path / "moved", ignore=shutil.ignore_patterns("data"))
    predict = ["parse", "--checkpoint", str(tmp_path / "moved"), "--cpu", "--out", str(labels), "--predict"]
    main([*predict, str(place / "dev.conllu")])
    assert labels.read_bytes() == predictions.read_bytes()
    loaded = load_checkpoint(checkpoint)
    head, treebank = loaded.head("dependency_trees"), read_conllu(place / "dev.conllu")
    assert head.raw_text
    raw, joined = (
        [sentence.text for sentence in encode_sentences(loaded, treebank, own)[0]]
        for own in (head, dataclasses.replace(head, raw_text=False))
    )
    assert [text.replace(" .", ".") for text in joined] == raw != joined
    labels.unlink()
    words = [f"{n}\tthe\t_\t_\t_\t_\t{n - 1}\tdep\t_\t_\n" for n in range(1, 201)]
    (tmp_path / "long").write_text("".join(words))
    capsys.readouterr()
    main([*predict, str(tmp_path / "long")])
    (last,) = re.findall(r"the last ([0-9]+) words of sentences that are too long", capsys.readouterr().err)
    [tree] = read_conllu(labels).sentences
    assert tree.columns["deprel"][-int(last) :] == ["dep"] * int(last)
    assert "--part encoder" in error_line(capsys, main, "export", checkpoint, tmp_path / "hf", reports_progress=True)
    main(["export", str(checkpoint), str(tmp_path / "hf"), "--part", "encoder", "--no-check"])
    assert (tmp_path / "hf" / "config.json").is_file()


def test_trees_are_learned_from_few_and_sentences_without(place, tmp_path):
    """`amos parse --views`: pairs of views agree more and more with the parser, and are not in what it predicts with."""
    views = "full,forward-forward,forward-backward,backward-forward,backward-backward"
    flags = ["--labeled", 20, "--unlabeled", "rest", "--views", views]
    fine_tune("parse", place, tmp_path / "out", *treebanks(place), *flags)
    run = run_of(tmp_path / "out", "parsing")
    trained = [line for line in records(run) if line["split"] == "train" and "cvt_loss" in line]
    for view in views.split(","):
        assert 0 < trained[-1][f"kl_{view}"] < trained[0][f"kl_{view}"]
    assert json.loads((run / "scores.json").read_text())["las"] > 60  # 20 sentences of a small grammar
    assert load_checkpoint(run / "checkpoint_best.pt").model.cross_views is None


def test_what_cannot_be_used_is_refused_in_one_line(place, tmp_path, capsys):
    text, dev = (place / "train.conllu").read_text(), ["--dev", place / "dev.conllu"]
    for head, flags, message in (
        ("1", dev, "other.conllu, sentence in line 1: the heads are no tree with one root"),
        ("99", dev, "other.conllu, line 3: the head '99' of 'sees' is no other word"),
        ("0", [], "give the treebanks as --train FILE --dev FILE"),
    ):
        (tmp_path / "other.conllu").write_text(text.replace("\t0\troot", f"\t{head}\troot", 1))
        words = ["--checkpoint", place / "start", "--out", tmp_path / "out", "--train", tmp_path / "other.conllu"]
        assert message in error_line(capsys, main, "parse", *words, *flags, reports_progress=True)
