"""The text that the tests of tokenizers learn vocabularies from."""

from pathlib import Path

import pytest
from tokenizer_text import write_sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample"))
