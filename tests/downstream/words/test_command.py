"""``amos tag`` before the training: settings without use, and what it refuses."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from synthetic_glue import session as open_session
from synthetic_tagging import make_sentences

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.downstream.words import command
from amos_fairseq.downstream.words.command import encode_sentences, open_tagging, predict_file, word_trials
from amos_fairseq.downstream.words.dataset import WordSequences
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import TAGGING_VIEWS
from amos_fairseq.experiments.benchmark import PretrainedCheckpoint, Session
from amos_fairseq.experiments.recipes import WORDS
from amos_fairseq.inputs.word_files import Sentence, WordFile, read_sentences
from amos_fairseq.text.tokenization import load_tokenizer


@pytest.fixture
def session(start, tmp_path, monkeypatch) -> Session:
    """A checkpoint that takes every tokenizer."""
    monkeypatch.setattr(PretrainedCheckpoint, "check_tokenizer", lambda self, directory: None)
    return open_session(start, tmp_path / "out", "tag", recipe="amos_grid", lr=1e-5, epochs=2, batch_size=16)


def loaded_with(data: Path, max_tokens: int) -> SimpleNamespace:
    """A checkpoint without weights that reads so many tokens."""
    tokenizer, dictionary = load_tokenizer(data / "tokenizer"), Dictionary.load(str(data / "dict.txt"))
    model, head = SimpleNamespace(max_positions=lambda: max_tokens), HeadOutputs("words", [], raw_text=True)
    return SimpleNamespace(tokenizer=tokenizer, dictionary=dictionary, model=model, head=lambda name: head)


def test_folders_that_cannot_be_used_are_refused_before_the_training(session, data, tmp_path):
    for folders, message in (
        ([data, data], "is another folder of the column ner"),
        ([tmp_path / "a:b"], "a:b: fairseq separates folders at ':': give a path without it"),
        ([session.out], r"is the directory of the data, which has a tagging\.json too"),
    ):
        with pytest.raises(UserError, match=message):
            open_tagging(session, folders, session.recipe.trials_of(WORDS))


@pytest.mark.parametrize("max_tokens", [3, 17, 40, 200])
def test_sentences_of_a_file_have_the_bits_of_the_dev_set(max_tokens, data):
    """Of prepared data, also where words are cut."""
    dev, loaded = WordSequences(data, "valid", max_tokens), loaded_with(data, max_tokens)
    file = read_sentences(data.parent / "train.txt", labeled=False)
    sentences, found = encode_sentences(loaded, file, loaded.head("ner"))
    assert len(sentences) == len(found) == len(dev)
    for index, ((first, sentence), *others) in enumerate(found):
        assert first == 0
        assert sentence.keys() == {"tokens", "positions"}
        is_cut = len(dev[index]["positions"]) < len(sentences[index].words)
        assert is_cut == bool(others) or max_tokens == 3, "a word of several pieces is a window of its own"
        if len(dev[index]["positions"]):  # of a first word that does not fit, dev has none
            assert all(torch.equal(sentence[name], dev[index][name]) for name in sentence)


@pytest.mark.parametrize("max_tokens", [3, 4, 9, 40])
def test_each_word_of_a_long_sentence_is_read_where_it_has_most_text_around_it(max_tokens, data, monkeypatch):
    """The stand-in of the model returns the first piece of a word, and how far the ends of its window are."""
    loaded = loaded_with(data, max_tokens)

    def stand_in(model, name, windows, *_):
        assert all(len(window["tokens"]) <= max_tokens for window in windows)
        num = [len(window["positions"]) for window in windows]
        return [
            [(int(piece), k, n - 1 - k) for k, piece in enumerate(window["tokens"][window["positions"]])]
            for window, n in zip(windows, num, strict=True)
        ]

    monkeypatch.setattr(command, "predict_words", stand_in)
    words = [word for sentence in make_sentences() for word, _, _ in sentence]
    texts = [*(words[:n] for n in (1, 2, 7, 50, len(words))), [*words[:60], "x" * 100, *words[:60]]]
    file = WordFile(data, "", [Sentence(text, {}, [1] * len(text)) for text in texts])
    _, encoded = encode_sentences(loaded, file, loaded.head(""))
    for text, windows, found in zip(texts, encoded, predict_file(loaded, "", file, list, "cpu"), strict=True):
        pieces, ranges = loaded.tokenizer.encode_words(text)
        assert [piece for piece, _, _ in found] == [pieces[start] for start, _ in ranges]
        spans = [(first, first + len(window["positions"]) - 1) for first, window in windows]
        # Half of the words that two windows share, where these have half of a window, at most 4 pieces a word.
        fewest = (max_tokens - 2) // 4 // 4 if "x" * 100 not in text else 0
        for word, (_, before, after) in enumerate(found):
            assert before >= min(word, fewest)
            assert after >= min(len(found) - 1 - word, fewest)
            assert min(before, after) == max(min(word - a, b - word) for a, b in spans if a <= word <= b)
        assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(spans)), "each has a word that is new"
    assert found[59][1] >= (max_tokens - 2) // 2 // 4, "before a word that fills a window: half a window of words"
    (alone,) = predict_file(loaded, "", WordFile(data, "", file.sentences[-2:-1]), list, "cpu", in_windows=False)
    assert len(alone) < len(words)


def test_a_constant_label_and_sentences_that_train_too(session, data, pos, tmp_path):
    """The constant is the most frequent label of the training words: here those of dev."""
    tags = [tag for rows in make_sentences() for _, tag, _ in rows]
    most = max(set(tags), key=tags.count)
    trials = word_trials(session, TAGGING_VIEWS, None)
    both = open_tagging(session, [pos, data], trials)
    (task,) = both.tasks.values()
    longer = sum(len(rows) > 3 for rows in make_sentences())
    seen = f"{longer} of 40 dev sentences train too: the scores may be too high"
    assert list(task.notes) == [f"pos: {seen}", f"ner: {seen}"]
    of_pos, of_ner = both.constants().values()
    assert list(both.constants()) == ["tagging-pos of pos,ner", "tagging-ner of pos,ner"]
    share = 100 * tags.count(most) / len(tags)
    assert (of_pos.num_scored, of_pos.scores) == (len(tags), {f"most frequent label ({most})": {"accuracy": share}})
    (scores,) = of_ner.scores.values()
    assert scores.keys() == {"f1", "precision", "recall", "accuracy"}
    names, no_span = (
        ["word", "pos", "ner"],
        "line 1: the label 'PERSON' of the word 'a' marks no span, as the others do",
    )
    for name, content, columns, message in (
        ("t.jsonl", '{"tokens": ["a"], "pos": ["NOUN"]}\n', None, "t.jsonl has no column 'ner', it has tokens, pos"),
        ("t.txt", "a\tNOUN\n\n", None, "t.txt has no column pos: give --column with one of label, or its names as --c"),
        ("t.txt", "a\tNOUN\tPERSON\n\n", names, no_span),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            both.read_test(tmp_path / name, columns)
    alone = open_tagging(session, [pos], trials)
    assert list(alone.constants()) == ["tagging-pos"]
