"""Documents of texts against the list that was written: blank lines, ends of lines, rows without text; what is printed."""

import json
from pathlib import Path

import pytest

from amos_fairseq.inputs import LINE
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.files import clean_lines

SENTENCES = ["One word.", "Two words, naïve.", "Three 中文.", "Four."]


def written(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def documents(path: Path, **settings: str) -> list[bytes]:
    return list(DocumentFile(path, **settings).read())


def as_documents(*texts: str) -> list[bytes]:
    return [f"{text}\n".encode() for text in texts]


@pytest.mark.parametrize("blank", ["", " \t", "\0", "\u00a0\u3000", "\ufeff", "\x0c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blank_lines_end_documents_in_text_and_not_in_tables(tmp_path, blank, end):
    text = end.join([SENTENCES[0], SENTENCES[1], blank, f" {SENTENCES[2]}\t", blank, blank, SENTENCES[3], ""])
    paths = [written(tmp_path / "t.txt", text), written(tmp_path / "t.jsonl", json.dumps({"text": text}))]
    assert documents(paths[0]) == as_documents("\n".join(SENTENCES[:2]), *SENTENCES[2:])
    assert documents(paths[0], document=LINE) == as_documents(*SENTENCES)
    assert documents(paths[1]) == documents(paths[1], document=LINE) == as_documents("\n".join(SENTENCES))


@pytest.mark.parametrize("space", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_other_line_separators_are_spaces(tmp_path, space):
    """The same in text, JSON and tables; some tokenizers remove them and would join the words."""
    text = f"{space}one{space}two{space}"
    contents = {"t.txt": f"{text}\n\nlast\n", "t.csv": f'text\n"{text}"\nlast\n', "t.tsv": f"text\n{text}\nlast\n"}
    contents["t.jsonl"] = "".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in (text, "last"))
    for name, content in contents.items():
        assert documents(written(tmp_path / name, content)) == as_documents("one two", "last"), name
    assert clean_lines(text + "\r\n" + text) == ["one two"] * 2


def test_rows_without_a_text_are_counted(tmp_path, capsys):
    """Missing, null, blank, NaN, half of a surrogate pair; a whole pair is a character, and a word is a text."""
    values = ['"one"', "null", '""', r'"\u200b"', "NaN", r'"half \ud83d here"', r'"\ud83d\ude00"', '"NULL"', '"two"']
    rows = [*(f'{{"text": {value}, "id": NaN}}' for value in values), '{"id": 1}', ""]
    path = written(tmp_path / "t.jsonl", "\n".join(rows))
    assert documents(path) == as_documents("one", "\U0001f600", "NULL", "two")
    assert capsys.readouterr().err == f"prepare: {path}: 4 documents; left out: 6 without a text in text\n"
    path = written(tmp_path / "t.tsv", 'text\tid\n"a\nb"\t1\nbroken\n\nc\t2\n')
    assert documents(path) == as_documents("a\nb", "c")
    assert capsys.readouterr().err == (
        f"prepare: {path}: 2 documents (1 of several lines, between quotes); left out: 1 with another number of columns "
        "than the first line, or equal to it\n"
    )
    path = written(tmp_path / "t.txt", "caf\ufffd \ufffd\n\nb\n")
    assert documents(path) == as_documents("caf\ufffd \ufffd", "b")
    assert capsys.readouterr().err.endswith(
        f"prepare: {path}: WARNING: 2 characters U+FFFD: bytes that an earlier program did not decode\n"
    )


NOT_WRAPPED = {
    "poem": "in the forests of the night,\nwhat immortal hand or eye\ncould frame thy fearful symmetry\n" * 40,
    "dialogue": '"Yes," he said and went to the window.\nso she left the house alone and without a word\n' * 40,
    "sentences": "".join(f"the sentence {n} has the length of the others.\n" for n in range(10, 99)),
    "Chinese": "床前明月光疑是地上霜举头望明月低头思故乡床前明月光疑是地上霜举头\n" * 40,
    "paragraphs": f"{'a paragraph of a line ' * 20}\n" * 40,
    "addresses": "https://example.org/an/address/of/some/length\n" * 40,
}


@pytest.mark.parametrize("kind", NOT_WRAPPED)
def test_no_alarm_of_wrapped_lines(kind, tmp_path, capsys):
    documents(written(tmp_path / "t.txt", NOT_WRAPPED[kind]))
    assert "WARNING" not in capsys.readouterr().err


def test_the_first_document_is_printed(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", '{"id": 1}\n{"body": "One.\\n\\nTwo."}\n')
    DocumentFile(path, "body").print_first()
    expected = f"prepare: {path}: JSON lines, column body\nprepare: {path}: the first: One. ¶ Two.\n"
    assert capsys.readouterr().err == expected
    path = written(tmp_path / "t.txt", "One.\nTwo.\n\nThree.\n")
    for document, kind, first in (
        ("blank", "blank lines between documents", "One. ¶ Two."),
        (LINE, "a document a line", "One."),
    ):
        DocumentFile(path, document=document).print_first()
        assert capsys.readouterr().err == f"prepare: {path}: plain text, {kind}\nprepare: {path}: the first: {first}\n"
