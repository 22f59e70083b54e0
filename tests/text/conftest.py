"""Inputs and corpora that the tests of amos prepare share."""

import pytest
from failures import error_line
from preparing import prepare
from synthetic_corpus import DOCUMENTS, FLAGS, write_jsonl, write_text


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    return [
        str(write_text(directory / "one.txt", DOCUMENTS[: len(DOCUMENTS) // 3])),
        str(write_jsonl(directory / "two.jsonl", DOCUMENTS[len(DOCUMENTS) // 3 :])),
    ]


@pytest.fixture(scope="session")
def corpus(inputs, tmp_path_factory):
    """A finished corpus of several shards, made by one process, and the flags that made it; tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "corpus"
    prepare("text")([*inputs, *FLAGS, "--out", str(out), "--workers", "1"])
    return out, [*inputs, *FLAGS]


@pytest.fixture
def refused(capsys):
    """Run amos prepare text with arguments that it must refuse; return its error line."""
    return lambda *arguments: error_line(capsys, prepare("text"), *arguments, reports_progress=True)
