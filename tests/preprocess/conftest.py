"""Inputs and corpora that the tests of prepare.sh share."""

import pytest
from pretraining_corpus import DOCUMENTS, FLAGS, write_jsonl, write_text

from preprocess.pretraining import prepare


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Text and JSON lines, as the arguments of a command."""
    directory = tmp_path_factory.mktemp("inputs")
    return [
        str(write_text(directory / "one.txt", DOCUMENTS[: len(DOCUMENTS) // 3])),
        str(write_jsonl(directory / "two.jsonl", DOCUMENTS[len(DOCUMENTS) // 3 :])),
    ]


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory):
    """As ``corpus``, of one kind, for tests of what does not depend on the tokenizer."""
    out = tmp_path_factory.mktemp("reference") / "corpus"
    prepare.main([*inputs, *FLAGS, "--out", str(out), "--workers", "1"])
    return out, [*inputs, *FLAGS]


@pytest.fixture
def refused(capsys):
    """Run a command that must fail; returns its one line."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            prepare.main(list(map(str, arguments)))
        lines = capsys.readouterr().err.rstrip("\n").split("\n")
        assert stop.value.code == 1
        assert sum("error" in line for line in lines) == 1, lines
        assert lines[-1].startswith("amos_fairseq: error: ")
        return lines[-1]

    return run
