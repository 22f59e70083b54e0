"""``amos tag`` before the training: settings without use, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from preparing import prepare
from synthetic_tagging import NAMES_OF_COLUMNS, make_sentences, prepare_tagging

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.downstream.words.command import encode_sentences, open_tagging, word_trials
from amos_fairseq.downstream.words.dataset import WordSequences
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import TAGGING_VIEWS
from amos_fairseq.experiments.benchmark import PretrainedCheckpoint, Session
from amos_fairseq.experiments.recipes import WORDS, load_recipe
from amos_fairseq.inputs.word_files import read_sentences
from amos_fairseq.text.tokenization import load_tokenizer


@pytest.fixture
def session(tmp_path, monkeypatch) -> Session:
    """A checkpoint that takes every tokenizer."""
    monkeypatch.setattr(PretrainedCheckpoint, "check_tokenizer", lambda self, directory: None)
    file, settings = Path("checkpoint_last.pt"), {"max_positions": 100}
    checkpoint = PretrainedCheckpoint(file, "", "amos_tiny", settings, {}, num_updates=10)
    overrides = {"lr": 1e-5, "epochs": 2, "batch_size": 16}
    recipe = load_recipe("amos_grid", "small", overrides)
    return Session(checkpoint, recipe, overrides, (1,), tmp_path / "out", ("cpu",), "float32", keep_checkpoints=False)


def test_folders_that_cannot_be_used_are_refused_before_the_training(session, tmp_path):
    data = prepare_tagging(tmp_path)
    for folders, message in (
        ([data, data], "is another folder of the column ner"),
        ([tmp_path / "a:b"], "a:b: fairseq separates folders at ':': give a path without it"),
        ([session.out], r"is the directory of the data, which has a tagging\.json too"),
    ):
        with pytest.raises(UserError, match=message):
            open_tagging(session, folders, session.recipe.trials_of(WORDS))


@pytest.mark.parametrize("max_tokens", [3, 17, 40, 200])
def test_sentences_of_a_file_have_the_bits_of_the_dev_set(max_tokens, tmp_path):
    """Of prepared data, also where words are cut."""
    dev = WordSequences(prepare_tagging(tmp_path), "valid", max_tokens)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    model = SimpleNamespace(max_positions=lambda: max_tokens)
    loaded = SimpleNamespace(tokenizer=tokenizer, dictionary=dictionary, model=model)
    file, head = read_sentences(tmp_path / "train.txt", labeled=False), HeadOutputs("words", [], raw_text=True)
    _, found = encode_sentences(loaded, file, head)
    for index, sentence in enumerate(found):
        assert sentence.keys() == {"tokens", "positions"}
        assert all(torch.equal(sentence[name], dev[index][name]) for name in sentence)
    assert len(found) == len(dev)


def test_a_constant_label_and_sentences_that_train_too(session, tmp_path):
    """The constant is the most frequent label of the training words: here those of dev."""
    prepare_tagging(tmp_path)
    pos = tmp_path / "pos"
    source = tmp_path / "train.txt"
    prepare("tagging")([source, source, tmp_path / "tokenizer", pos, *NAMES_OF_COLUMNS, "--column", "pos"])
    tags = [tag for rows in make_sentences() for _, tag, _ in rows]
    most = max(set(tags), key=tags.count)
    trials = word_trials(session, TAGGING_VIEWS, None)
    both = open_tagging(session, [pos, tmp_path / "data"], trials)
    (task,) = both.tasks.values()
    seen = "40 of 40 dev sentences train too: the scores may be too high"
    assert list(task.notes) == [f"pos: {seen}", f"ner: {seen}"]
    of_pos, of_ner = both.constants().values()
    assert list(both.constants()) == ["tagging-pos of pos,ner", "tagging-ner of pos,ner"]
    share = 100 * tags.count(most) / len(tags)
    assert (of_pos.num_scored, of_pos.scores) == (len(tags), {f"most frequent label ({most})": {"accuracy": share}})
    (scores,) = of_ner.scores.values()
    assert scores.keys() == {"f1", "precision", "recall", "accuracy"}
    for name, content, message in (
        ("other.jsonl", '{"tokens": ["a"], "pos": ["NOUN"]}\n', "other.jsonl has no column 'ner', it has tokens, pos"),
        (
            "label.txt",
            "a\tNOUN\n\n",
            "label.txt has no column pos: give --column with one of label, or its names as --columns",
        ),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            both.read_test(tmp_path / name, None)
    (tmp_path / "test.txt").write_text("a\tNOUN\tPERSON\n\n")
    with pytest.raises(UserError, match="line 1: the label 'PERSON' of the word 'a' marks no span, as the others do"):
        both.read_test(tmp_path / "test.txt", ["word", "pos", "ner"])
    alone = open_tagging(session, [pos], trials)
    assert list(alone.constants()) == ["tagging-pos"]
