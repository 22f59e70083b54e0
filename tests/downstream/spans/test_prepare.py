"""``amos prepare squad``: its files and counts; answers aligned to tokens."""

import random

import numpy as np
import pytest
from fairseq.data import Dictionary
from hugging_face_folders import train_wordpiece
from synthetic_squad import make_squad, prepare_squad, word

from amos_fairseq.downstream.spans.dataset import SquadSplit
from amos_fairseq.downstream.spans.prepare import EXACT, LOST, MISPLACED, WIDER, align_answer
from amos_fairseq.inputs.question_files import MANIFEST, Answer
from amos_fairseq.text.prepared_data import read_manifest
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer


def test_files_have_every_question_and_paragraph(tmp_path):
    """Ids of the tokenizer and fairseq's dictionary, one text at a time, and the tokenizer's offsets."""
    squad = make_squad()
    data = prepare_squad(tmp_path, squad)
    tokenizer, dictionary = load_tokenizer(data / "tokenizer"), Dictionary.load(str(data / "dict.txt"))
    paragraphs = squad["data"][0]["paragraphs"]
    for name in ("train", "valid"):
        split = SquadSplit(data, name)
        asked = [(number, q) for number, paragraph in enumerate(paragraphs) for q in paragraph["qas"]]
        assert len(split.examples) == len(asked)
        for index, (number, q) in enumerate(asked):
            example = split.examples[index]
            assert (example.context, example.id, example.is_impossible) == (number, q["id"], q["is_impossible"])
            expected = [dictionary.index(piece) for piece in tokenizer.encode(q["question"])]
            assert split.questions[index].tolist() == expected
            answers = [{"text": answer.text, "answer_start": answer.start} for answer in example.answers]
            assert answers == q["answers"]
        assert split.texts == [paragraph["context"] for paragraph in paragraphs]
        assert len(split.contexts) == len(paragraphs)
        for number, text in enumerate(split.texts):
            assert split.contexts[number].tolist() == [dictionary.index(piece) for piece in tokenizer.encode(text)]
            spans = [(start, end) for _, start, end in tokenizer.encode_with_offsets(text)]
            assert list(zip(*(part.tolist() for part in split.offsets(number)), strict=True)) == spans


def test_inexact_answers_are_counted(tmp_path):
    """A misplaced answer is not trained on; one that ends inside a token is extended to it."""
    squad = make_squad(seed=2)
    first, second, third = squad["data"][0]["paragraphs"][0]["qas"][:3]
    first["answers"] = [{"text": "no such text", "answer_start": 3}]
    context = squad["data"][0]["paragraphs"][0]["context"]
    second["answers"] = [{"text": "olou", "answer_start": context.index("olou")}]
    data = prepare_squad(tmp_path, squad)
    facts = read_manifest(data / MANIFEST)["splits"]["train"]
    assert facts["answers"] == {"exact": 56, "wider": 1, "lost": 0, "misplaced": 1}
    assert facts["untrainable"] == 1
    split = SquadSplit(data, "train")
    assert [not example.spans for example in split.examples[:3]] == [True, False, False]
    assert split.examples[2].answers[0].text == third["answers"][0]["text"]


CONTEXT = "In  the 1910s, «Zoë» ate ½ ﬁsh\u00a0(cafe\u0301-style) for $5.50; 中国 won 24\u201310.\nEnd"
# Answers between word boundaries, which are boundaries of pieces for every tokenizer.
BETWEEN_WORDS = ["1910s", "Zoë", "ate ½", " ate ½ ", "ﬁsh", "ﬁsh\u00a0(cafe\u0301-style)", "cafe\u0301", "24\u201310"]
BETWEEN_WORDS += ["End", "中国", "In  the 1910s"]


@pytest.fixture(scope="module", params=["sentencepiece", "wordpiece"])
def aligned(request, tmp_path_factory):
    """The context's tokens as (starts, ends)."""
    directory = tmp_path_factory.mktemp(request.param)
    generator = random.Random(1)
    words = [" ".join(word(generator) for _ in range(60)) + " 1910s ate style", CONTEXT] * 3
    if request.param == "wordpiece":
        train_wordpiece(directory / "tokenizer", words)
        tokenizer = load_tokenizer(directory / "tokenizer")
    else:
        (directory / "text.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        tokenizer = learn_tokenizer(directory / "text.txt", 150, cased=False)
    pieces = tokenizer.encode_with_offsets(CONTEXT)
    return np.array([start for _, start, _ in pieces]), np.array([end for _, _, end in pieces])


def test_answers_between_word_boundaries_are_exact(aligned):
    """Spaces around an answer do not count."""
    starts, ends = aligned
    for text in BETWEEN_WORDS:
        tokens, fit = align_answer(Answer(text, CONTEXT.index(text)), CONTEXT, starts, ends)
        assert fit == EXACT, text
        # SentencePiece may have a piece like "10.", whose full stop the official comparison does not see.
        assert CONTEXT[starts[tokens[0]] : ends[tokens[1]]].rstrip(".") == text.strip()


def test_written_examples():
    """Tokens "go" "lfer" "'s" and an empty one: an answer inside a token takes the fewest tokens that contain it."""
    context, starts, ends = "golfer's  !", np.array([0, 2, 8, 6]), np.array([2, 6, 8, 8])
    cases = {("golfer", 0): ((0, 1), EXACT), ("golf", 0): ((0, 1), WIDER), ("ol", 1): ((0, 1), WIDER)}
    cases |= {("'s", 6): ((3, 3), EXACT), ("!", 10): (None, LOST), ("  ", 8): (None, LOST)}
    cases |= dict.fromkeys([("golf", 1), ("golf", -11), ("x", 50)], (None, MISPLACED))
    assert {given: align_answer(Answer(*given), context, starts, ends) for given in cases} == cases
    # A lone mark of a word, which stands for no character, is never the first token.
    assert align_answer(Answer(" x", 0), " x", np.array([1, 1]), np.array([1, 2])) == ((1, 1), EXACT)
    # Punctuation at the borders changes no score.
    assert align_answer(Answer("golfer's", 0), context, starts, np.array([2, 6, 8, 11]))[1] == EXACT
