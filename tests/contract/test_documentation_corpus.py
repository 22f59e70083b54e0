"""The default corpus: prose of written examples, the same bytes for any number of processes, no source is executed."""

from pathlib import Path

import documentation_corpus as corpus
import pytest

DOCSTRING = """Return the smallest value of a sequence that holds at least one.

The ``sequence`` is read :func:`once <iter>` only, so that a generator
can be given as well as a list [1]_.

Parameters
----------
sequence : iterable of int
    The values that are compared with one another.
key (callable, optional): A function that is called with every value of
    the sequence before the comparison.

- It is an error if the sequence is empty.

>>> smallest([3, 1, 2])
1

Alpha Beta Gamma Delta Epsilon Zeta.
"""
PROSE_OF_DOCSTRING = [
    "Return the smallest value of a sequence that holds at least one.",
    "The sequence is read once only, so that a generator can be given as well as a list.",
    "The values that are compared with one another.",
    "A function that is called with every value of the sequence before the comparison.",
    "It is an error if the sequence is empty.",
]

NO_PROSE = [
    "too short to be a sentence.",
    "lower case at the start of what may be the second half of a sentence.",
    "The title of a section that ends without a full stop",
    "The value of x is set by x=1 and the value of y by the caller.",
    "Computes the sum as \\sum_i a_i for all of the terms in the sequence.",
    "| the | cells | of | a | table | are | not | a | sentence.",
    "Values of 1 2 3 4 5 6 7 8 9 10 11 12 13 14 in the table.",
]


def test_prose_of_a_docstring():
    """Without tables, code and fragments."""
    assert list(corpus.prose_paragraphs(DOCSTRING)) == PROSE_OF_DOCSTRING
    assert [paragraph for paragraph in NO_PROSE if list(corpus.prose_paragraphs(paragraph))] == []


def test_sources_are_read_and_never_executed(tmp_path: Path):
    trap = tmp_path / "trap.py"
    marker = tmp_path / "executed"
    trap.write_text(
        f'"""This module must never be run by the one that reads it."""\nopen({str(marker)!r}, "w")\n'
        'def function():\n    """Say in one sentence what this function does."""\n'
        'document(function, """\n    The second text is handed to a function that\n    attaches it later.\n    """)\n'
        'message = "This is a message to the user and not a part of any documentation."\n',
        encoding="utf-8",
    )
    assert corpus.read_source(trap) == [
        [
            "This module must never be run by the one that reads it.",
            "Say in one sentence what this function does.",
            "The second text is handed to a function that attaches it later.",
        ]
    ]
    assert not marker.exists()


def test_repetitions_are_dropped_and_documents_separated(tmp_path: Path):
    documents = [["One two.", "Three four."], ["ONE, two!"], ["Five.", "Three, four."]]
    target = tmp_path / "corpus.txt"
    counts = corpus.write_corpus(corpus.without_repetitions(documents), target)
    assert target.read_text(encoding="utf-8") == "One two.\nThree four.\n\nFive.\n\n"
    assert counts == (2, 3, 5, 29)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_documents():
    sources = corpus.python_sources()[:25]
    one, two = (list(corpus.documents_of(sources, processes)) for processes in (1, 2))
    assert one == two
    assert sum(map(len, one)) > 30
