"""The lengths that remain of texts, against Hugging Face's fast tokenizers."""

import itertools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from amos_fairseq.text.tokenization.truncation import kept_lengths


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    """A token a word, without special tokens."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_lengths_are_those_of_longest_first(library):
    for first, second, limit in itertools.product(range(1, 9), range(1, 9), range(1, 17)):
        library.enable_truncation(limit, strategy="longest_first")
        ids = library.encode(" ".join("x" * first), " ".join("y" * second)).ids
        assert kept_lengths([first, second], limit) == [ids.count(0), ids.count(1)], (first, second, limit)
    for length in range(1, 9):
        library.enable_truncation(5, strategy="longest_first")
        assert kept_lengths([length], 5) == [len(library.encode(" ".join("x" * length)).ids)]
