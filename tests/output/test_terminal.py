"""Tables of results: what Markdown and the terminal show of the same cells."""

import io

from rich.console import Console

from amos_fairseq.output.terminal import Table, format_score


def test_names_are_no_html_and_no_links() -> None:
    """A column of a stranger's table is part of the title and of notes."""
    table = Table("<img src=x>, dev", ["", "a"], [["<b>", "[1](2)"]], ["<s> ![x](y)"])
    rows = ["|  | a |", "| --- | ---: |", "| &lt;b> | [1]\\(2) |"]
    assert table.as_markdown().splitlines() == ["# &lt;img src=x>, dev", "", *rows, "", "- &lt;s> ![x]\\(y)"]


def test_markdown_has_the_cells_and_the_notes() -> None:
    table = Table("Scores", ["", "accuracy"], [["ours", "88.9 ± 0.1"], ["a|b", "-"]], ["a note"])
    rows = ["|  | accuracy |", "| --- | ---: |", "| ours | 88.9 ± 0.1 |", "| a\\|b | - |"]
    assert table.as_markdown().splitlines() == ["# Scores", "", *rows, "", "- a note"]


def test_more_columns_than_rows_are_turned_on_the_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    Table("Scores", ["", "RTE", "MRPC"], [["ours", "1.0", "2.0"]], ["[a note]"]).print(console)
    words = console.file.getvalue().split()
    assert words.index("RTE") < words.index("1.0") < words.index("MRPC") < words.index("2.0")
    assert console.file.getvalue().rstrip().endswith("* [a note]")


def test_scores_have_one_decimal_and_a_missing_one_is_a_dash() -> None:
    assert [format_score(88.88), format_score(88.9, 0.14), format_score(None)] == ["88.9", "88.9 ± 0.1", "-"]
