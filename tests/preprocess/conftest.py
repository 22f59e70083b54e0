"""Inputs and corpora that the tests of prepare.sh share."""

import pytest
from glue_files import write_files, write_tokenizer
from pretraining_corpus import DOCUMENTS, FLAGS, write_jsonl, write_text

from preprocess.glue import prepare as prepare_glue
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


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    """A directory with all hand-made GLUE files."""
    return write_files(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def glue_tokenizer(tmp_path_factory):
    """A tokenizer directory that fits their letters."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer")


@pytest.fixture(scope="session")
def prepared_glue(glue, glue_tokenizer, tmp_path_factory):
    """What prepare.sh makes of all of them; tests leave it as it is."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare_glue.main([str(glue), "ALL", str(glue_tokenizer), str(out), "--workers", "2"])
    return out
