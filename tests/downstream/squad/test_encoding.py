"""Characters of an answer to tokens of its context, for tokenizers of every kind."""

import random

import numpy as np
import pytest
from hugging_face_folders import train_wordpiece
from synthetic_squad import word

from amos_fairseq.downstream.squad.prepare import EXACT, LOST, MISPLACED, WIDER, align_answer
from amos_fairseq.downstream.squad.question_files import Answer
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

CONTEXT = "In  the 1910s, «Zoë» ate ½ ﬁsh\u00a0(cafe\u0301-style) for $5.50; 中国 won 24\u201310.\nEnd"
# Answers between word boundaries, which are boundaries of pieces for every tokenizer.
BETWEEN_WORDS = [
    "1910s",
    "Zoë",
    "ate ½",
    "ﬁsh",
    "ﬁsh\u00a0(cafe\u0301-style)",
    "cafe\u0301",
    "24\u201310",
    "End",
    "中国",
]
BETWEEN_WORDS += ["In  the 1910s"]


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
    for text in [*BETWEEN_WORDS, " ate ½ "]:
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
