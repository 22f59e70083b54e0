"""The text that the tests of tokenizers learn vocabularies from, and a tokenizer of each kind."""

from pathlib import Path

import pytest
from tokenizer_text import small_tokenizer_of_kind, write_sample

from amos_fairseq.text.tokenization import Tokenizer


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="session", params=["cased", "uncased", "wordpiece", "bytes", "unigram", "spaces"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return small_tokenizer_of_kind(tmp_path_factory.mktemp(request.param), request.param)
