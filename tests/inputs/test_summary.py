"""What is printed of a file that was read, against the lines of the docstring."""

from pathlib import Path

from amos_fairseq.inputs.summary import SHOWN_CHARACTERS, print_what_was_read


def test_kind_columns_counts_and_the_first_row(capsys):
    left_out = {"without label": 3, "without text": 0}
    print_what_was_read(Path("reviews.tsv"), "TSV", ["text", "label"], 1200, left_out, "good\tfilm -> pos", "classify")
    assert capsys.readouterr().err == (
        "classify: reviews.tsv: TSV, columns text, label: 1,200 rows; left out: 3 without label\n"
        "classify: reviews.tsv: the first: good film -> pos\n"
    )
    print_what_was_read(Path("a.txt"), "text", [], 1, {}, "x" * 999, what="lines")
    assert capsys.readouterr().err == (
        f"prepare: a.txt: text: 1 lines\nprepare: a.txt: the first: {'x' * SHOWN_CHARACTERS} ...\n"
    )
