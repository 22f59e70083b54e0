"""Documents of texts against the list that was written: blank lines, ends of lines, rows without text, markup."""

import json
import re
from pathlib import Path

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.documents import BLANK, LINE, document_end, read_documents
from amos_fairseq.inputs.input_files import clean_lines, is_blank

SENTENCES = ["One word.", "Two words, naïve.", "Three 中文.", "Four."]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def documents(path: Path, **settings) -> list[bytes]:
    """Without the empty ones of rows that have no text."""
    return list(filter(None, read_documents(path, **settings)))


def as_documents(*texts: str) -> list[bytes]:
    return [f"{text}\n".encode() for text in texts]


# What an editor shows as nothing.
BLANK_TEXTS = ["", " \t", "\0", *"\u00a0\u3000\u200b\ufeff\u2060\u3164\u180e", "\u2003\u2009", "\ufe0f\u00ad"]


def test_what_an_editor_shows_is_not_blank():
    assert not any(map(is_blank, [".", "a", "\u00a0a", "\u200b中", "\u0301", "\U0001f600", "\u200d_", "-"]))


@pytest.mark.parametrize("blank", [*BLANK_TEXTS, "\x0c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blank_lines_end_documents_in_text_and_not_in_tables(tmp_path, blank, end):
    text = end.join([SENTENCES[0], SENTENCES[1], blank, f" {SENTENCES[2]}\t", blank, blank, SENTENCES[3], ""])
    paths = [written(tmp_path / "t.txt", text), written(tmp_path / "t.jsonl", json.dumps({"text": text}))]
    assert document_end(paths[0], None) == BLANK
    assert documents(paths[0]) == as_documents("\n".join(SENTENCES[:2]), *SENTENCES[2:])
    assert documents(paths[1]) == as_documents("\n".join(SENTENCES))


@pytest.mark.parametrize("space", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_other_line_separators_are_spaces(tmp_path, space):
    """The same in text, JSON and tables; some tokenizers remove them and would join the words."""
    text = f"{space}one{space}two{space}"
    contents = {"t.txt": f"{text}\n\nlast\n", "t.csv": f'text\n"{text}"\nlast\n', "t.tsv": f"text\n{text}\nlast\n"}
    contents["t.jsonl"] = "".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in (text, "last"))
    for name, content in contents.items():
        assert documents(written(tmp_path / name, content)) == as_documents("one two", "last"), name
    assert clean_lines(text + "\r\n" + text) == ["one two"] * 2


LINES = "".join(f"{sentence}\n" for sentence in SENTENCES)
ENDS = {
    "lines": (LINES, LINE),
    "blank lines around": (f"\n \n{LINES}\n\n", LINE),
    "CR": (LINES.replace("\n", "\r"), LINE),
    "CR CR LF": (LINES.replace("\n", "\r\r\n"), LINE),
    "a blank line at the end of a long text": (LINES * 99 + "\nlast", BLANK),
    "one line": ("word " * 9999, BLANK),
    "JSON": ('{"text": "a"}\n', None),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_document_is_inferred(tmp_path, name):
    content, end = ENDS[name]
    assert document_end(written(tmp_path / "t.txt", content), None) == end
    assert document_end(tmp_path / "t.txt", 7) == (end and 7)


def test_lines_as_documents(tmp_path):
    """Blank lines do not count, and the last document may be shorter."""
    path = written(tmp_path / "t.txt", "\n".join([SENTENCES[0], "", *SENTENCES[1:], "", SENTENCES[0]]))
    lines = [*SENTENCES, SENTENCES[0]]
    assert documents(path) == as_documents(lines[0], "\n".join(lines[1:4]), lines[4])
    assert documents(path, document=LINE) == as_documents(*lines)
    for number in (2, 3, 5, 6):
        expected = ["\n".join(lines[start : start + number]) for start in range(0, 5, number)]
        assert documents(path, document=number) == as_documents(*expected)


def test_rows_without_a_text_are_counted(tmp_path, capsys):
    """Missing, null, blank, NaN, a word for it, half of a surrogate pair; a whole pair is a character."""
    values = ['"one"', r'"\\N"', "null", '""', r'"\u200b"', "NaN", '"nan"', '"NULL"', r'" None\n"', '"N/A"']
    rows = [*(f'{{"text": {value}}}' for value in values), '{"id": 1}', ""]
    rows += ['{"text": "half \\ud83d here"}', '{"text": "\\ud83d\\ude00"}', '{"text": "two", "id": NaN, "\\ud83d": 1}']
    found = list(read_documents(written(tmp_path / "t.jsonl", "\n".join(rows))))
    assert found == [b"one\n", *[b""] * 11, "\U0001f600\n".encode(), b"two\n"]
    assert "t.jsonl: 11 of its rows, the first in line 2, have no text in text" in capsys.readouterr().err
    assert documents(written(tmp_path / "t.txt", "NULL\n\nnan\n")) == as_documents("NULL", "nan")


def test_a_doubled_key_matters_in_a_field_that_is_read(tmp_path):
    lines = '{"text": "one", "id": 1, "id": 2, "meta": {"a": 1, "a": 2}}\n\ufeff{"text": "a file that cat appended"}\n'
    assert documents(written(tmp_path / "t.jsonl", lines)) == as_documents("one", "a file that cat appended")
    with pytest.raises(UserError, match=r"text is \{'en': 'one'\}, not a text"):
        documents(written(tmp_path / "t.jsonl", '{"text": {"en": "one"}}\n'))
    with pytest.raises(UserError, match=r"t\.jsonl, line 1 has the key 'text' twice"):
        documents(written(tmp_path / "t.jsonl", '{"text": "one", "text": "two"}\n'))


def test_parquet_names_the_cell_that_cannot_be_read(tmp_path):
    """Bytes that are no UTF-8, and a time that Python does not have, in the second batch."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    bad_text = pa.array([b"text"] * 149 + [b"\xed\xa0\x80"] + [None]).cast(pa.binary()).view(pa.string())
    bad_time = pa.array([0] * 150 + [1 << 60], pa.int64()).cast(pa.timestamp("ms"))
    for columns, message in (
        ({"text": bad_text}, "row 150: the value of text cannot be read .*UTF8"),
        ({"text": bad_time}, "row 151: the value of text cannot be read .*out of range"),
    ):
        parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
        with pytest.raises(UserError, match=message):
            list(read_documents(tmp_path / "t.parquet"))


def test_columns_that_are_not_read_are_named(tmp_path, capsys):
    assert documents(written(tmp_path / "t.tsv", "title\ttext\nOne\ttwo\n")) == as_documents("two")
    assert capsys.readouterr().err.endswith("t.tsv: text: text; not read: title\n")


MARKUP = {
    "one tag": ("\n\n".join([*SENTENCES * 30, "<p>", "words"]), "1 tags, .* the first is <p>"),
    "special tokens": ("\n".join([*SENTENCES * 9, "a<|endoftext|>b <|im_end|>"]), r"2 tags, .* <\|endoftext\|>"),
    "one separator": ("\n".join([*SENTENCES * 9, "<|endoftext|>", "b"]), r"1 tags, .* <\|endoftext\|>"),
    "a text about HTML": ("\n".join([*SENTENCES * 3, "<b>", "is a tag, <i> too", "</b>"]), "2 tags, .* <b>"),
    "JSON": ('{"text": "words\\n<doc id=1>\\n<div\\n"}\n', "1 tags, .* <doc id=1>"),
    "special tokens of words": ("\n".join([*SENTENCES, "an <unk> [MASK] of</s>"]), "3 tags, .* <unk>"),
    "entities": ("\n".join([*SENTENCES, "&quot;A &amp; B&#39;s&quot;<br />"]), "5 tags, .* the first is &quot;"),
    "speakers of a chat": ("\n".join(["<John> hi", "<Mary Ann> hello", "* John waves"] * 9), "18 tags, .* <John>"),
    "JSON in JSON": (json.dumps({"text": '{"a": "b"}\n'}), r'1 tags, .* the first is \{"a":'),
    "JSON that was written twice": (json.dumps({"text": r"One.\nTwo.\n"}), r"2 tags, .* the first is \\n"),
    "marks between documents": (
        "\n\n* * *\n\n".join(SENTENCES),
        r"3 lines such as '\* \* \*' have no letter or digit: .* sed -E 's/.*\$//' FILE > NEW",
    ),
    "marks without blank lines": ("\n---\n".join(SENTENCES), "3 lines such as '---' have no letter or digit"),
    "wiki": ("\n".join([*SENTENCES, "{{Infobox}}", "a [[link]]"]), r"2 tags, .* the first is \{\{"),
    "U+FFFD": ("\n".join([*SENTENCES, "caf\ufffd \ufffd"]), r"2 characters are U\+FFFD, ESC or BS, .* again"),
    "ISO-2022-JP": ("\n".join([*SENTENCES, "\x1b$B7|GK\x1b(B N\bN"]), r"3 characters are U\+FFFD, ESC"),
    "CoNLL-U": (
        "# text = I am\n1\tI\ti\tPRON\t_\t_\t2\tnsubj\t_\t_\n2\tam\tbe\tAUX\t_\t_\t0\troot\t_\t_\n",
        r"its first lines look like CoNLL-U: .* sed -n 's/\^# text = //p' FILE > NEW",
    ),
    "names with blanks": ("the text,Score (1-5)\nwords,1\nmore, and more,2", "its first lines look like a table"),
    "pandas": (",review,label\n0,words,1\n1,more,2", "its first lines look like a table"),
    "bars": ("id|review\n1|words\n2|more", "its first lines look like a table"),
    "a number": ("1,000 years ago\n" + LINES, None),
    "a number and a comma": ("1,000\n" + LINES, None),
    "a date": ("Paris, Texas\n" + LINES * 9, None),
    "tabs": ("\n".join(f"{sentence}\t1" for sentence in SENTENCES), "its first lines look like a table"),
    "a header": ("id,review\n1,words\n2,more", "its first lines look like a table"),
    "no tag": ("\n".join([*SENTENCES, "<3", "a < b > c", "< b>", "[a] & b;", r"R&D; x.\nu", "?", "?", "---"]), None),
}


@pytest.mark.parametrize("name", MARKUP)
def test_markup_in_a_text_is_counted(tmp_path, capsys, name):
    content, message = MARKUP[name]
    found = documents(written(tmp_path / "t.txt", content))
    num_lines = 3 if name == "JSON" else len(content.strip().replace("\n\n", "\n").split("\n"))
    assert b"".join(found).count(b"\n") == num_lines
    assert re.fullmatch(".*" + message + ".*\n" if message else "", capsys.readouterr().err)


def test_a_warning_needs_a_share_and_a_handful(tmp_path, capsys):
    """The number is printed always."""
    for tags, words, is_warning in ((5, 0, False), (6, 0, True), (6, 10_000, False)):
        documents(written(tmp_path / "t.txt", "<unk> " * tags + "words " * words))
        assert f"{tags} tags" in (error := capsys.readouterr().err)
        assert error.startswith("prepare: WARNING: ") == is_warning
        broken, rows = "a\n" * tags, "a\tb\n" * (tags + words)
        documents(written(tmp_path / "t.tsv", f"text\tid\n{broken}{rows}"))
        assert f"{tags} of its rows" in (error := capsys.readouterr().err)
        assert ("WARNING: " in error) == is_warning
