"""Tables of results: what Markdown, CSV and the terminal show of the same cells."""

import csv
import io

from rich.console import Console

from amos_fairseq.output.terminal import Table, format_score


def test_names_are_no_html_and_no_links() -> None:
    """A column of a stranger's table is part of the title and of notes."""
    table = Table("<img src=x>, dev", ["", "a"], [["<b>", "[1](2)"]], ["<s> ![x](y)"])
    rows = ["|  | a |", "| --- | ---: |", "| &lt;b> | [1]\\(2) |"]
    assert table.as_markdown().splitlines() == ["# &lt;img src=x>, dev", "", *rows, "", "- &lt;s> ![x]\\(y)"]


def test_files_have_the_same_cells(tmp_path) -> None:
    table = Table("Scores", ["", "accuracy"], [["ours", "88.9 ± 0.1"], ["a|b", "-"]], ["a note"])
    markdown, comma_separated = table.save(tmp_path / "scores")
    rows = ["|  | accuracy |", "| --- | ---: |", "| ours | 88.9 ± 0.1 |", "| a\\|b | - |"]
    assert markdown.read_text().splitlines() == ["# Scores", "", *rows, "", "- a note"]
    assert list(csv.reader(comma_separated.open())) == [["", "accuracy"], ["ours", "88.9 ± 0.1"], ["a|b", "-"]]


def test_more_columns_than_rows_are_turned_on_the_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    Table("Scores", ["", "RTE", "MRPC"], [["ours", "1.0", "2.0"]], ["[a note]"]).print(console)
    words = console.file.getvalue().split()
    assert words.index("RTE") < words.index("1.0") < words.index("MRPC") < words.index("2.0")
    assert console.file.getvalue().rstrip().endswith("* [a note]")


def test_scores_have_one_decimal_and_a_missing_one_is_a_dash() -> None:
    assert [format_score(88.88), format_score(88.9, 0.14), format_score(None)] == ["88.9", "88.9 ± 0.1", "-"]
