"""Each command of docs/converting.md for texts and tables, on an input that it is for, and what is read of the result."""

import bz2
import io
import json
import re
import shutil
import subprocess
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
from tiny_runs import ROOT

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.question_files import read_squad
from amos_fairseq.inputs.tables import TableFile
from amos_fairseq.inputs.word_files import read_sentences

PAGE = (ROOT / "docs" / "converting.md").read_text(encoding="utf-8")
TEXT = "Caf\u00e9 one.\n\nTwo.\n"
CONLL2012 = "".join(
    f"a 0 0 {row.split()[0]} P (S* - - - A {row.split()[1]} -\n" if " " in row else f"{row}\n"
    for row in ["#begin", "De (PER*", "la *", "O *)", "to *", "", "Rom (LOC)", "Oz (LOC)", ". *", "#end"]
)
READ = ["Caf\u00e9 one.\n", "Two.\n"]
ROWS = [{"text": "Caf\u00e9 one."}, {"text": "Two."}]


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return stream.getvalue()


def tarred() -> bytes:
    stream, member = io.BytesIO(), tarfile.TarInfo("a.txt")
    member.size = len(TEXT.encode())
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(member, io.BytesIO(TEXT.encode()))
    return stream.getvalue()


# The beginning of a command, its input, and the documents of its output.
COMMANDS = {
    "iconv -f UTF-16": (TEXT.encode("utf-16"), READ),
    "iconv -f CP1252": (TEXT.encode("cp1252"), READ),
    "iconv -f CP1251": ("Один.\n".encode("cp1251"), ["Один.\n"]),
    "iconv -c": (TEXT.encode().replace(b"Two", b"T\xe9wo"), READ),
    "unzip": (zipped(), READ),
    "tar": (tarred(), READ),
    "bunzip2": (bz2.compress(TEXT.encode()), READ),
    "tr": (TEXT.replace("\n", "\r").encode(), READ),
    "sed -E 's/^(": ("Caf\u00e9 one.\n<|endoftext|>\nTwo.\n* * *\n".encode(), READ),
    "sed 's/^[ ": (" Caf\u00e9\none.\n Two.\n".encode(), ["Caf\u00e9\none.\n", "Two.\n"]),
    "awk '{ gsub": ("Caf\u00e9\r\n  one.\r\n \r\n\r\nTwo.\r\n".encode(), READ),
    "awk '{ print": (b"a\tX\n.\tY\nb\tX\n?\tY\n", [["a/X", "./Y"], ["b/X", "?/Y"]]),
    "awk '!": (CONLL2012.encode(), [["De/B-PER", "la/I-PER", "O/I-PER", "to/O"], ["Rom/B-LOC", "Oz/B-LOC", "./O"]]),
    "sed -E 's/([ ": (b"a B-X\nb M-X\nc E-X\nd\tM-X\n", [["a/B-X", "b/I-X", "c/E-X", "d/I-X"]]),
    "fold": (b"word " * 1000 + b"\n", [f"{('word ' * 800).strip()}\n{('word ' * 200).strip()}\n"]),
    "sed -n": ("# text = Caf\u00e9 one.\n1\tCaf\u00e9\n\n# text = Two.\n1\tTwo\n".encode(), ["".join(READ)]),
    "jq -c '.[]' ": (json.dumps(ROWS, indent=1).encode(), READ),
    "jq -c '.data[]'": (json.dumps({"data": ROWS}).encode(), READ),
    "jq -c '.[] | {text: .}'": (json.dumps([row["text"] for row in ROWS]).encode(), READ),
    "jq -c '.[] | {text: .[1]": (json.dumps([["a", row["text"]] for row in ROWS]).encode(), READ),
    "jq -c . ": ("".join(json.dumps(row, indent=1) for row in ROWS).encode(), READ),
    "jq -c '.text": (json.dumps({"text": ["Caf\u00e9 one.", "Two."]}).encode(), ["Caf\u00e9 one.\nTwo.\n"]),
    "jq -r": ("".join(json.dumps({"text": f"{row['text']}\n"}) for row in ROWS).encode(), ["Caf\u00e9 one.\nTwo.\n"]),
}


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)[1]


def test_each_command_of_the_shell(tmp_path: Path) -> None:
    sections = section("Text") + section("JSON") + section("Words")
    blocks = re.findall(r"^```bash\n(.*?)^```", sections, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks if "# not run" not in block for line in block.splitlines() if line[:1] != "#"]
    assert len(lines) == len(COMMANDS)
    for line in lines:
        ((content, expected),) = [case for start, case in COMMANDS.items() if line.startswith(start)]
        if shutil.which(line.split()[0]) is None:
            continue
        new = line.partition(" > ")[2]
        old = next(word for word in line.split() if re.fullmatch(r"(old|rows)\.[\w.]+", word))
        (tmp_path / old).write_bytes(content)
        result = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0 or "iconv -c" in line, result.stderr
        assert read(tmp_path / new) == expected, line


def read(path: Path) -> list:
    if path.name != "words.tsv":
        return [document.decode() for document in DocumentFile(path).read()]
    sentences = read_sentences(path).sentences
    return [list(map("/".join, zip(each.words, each.columns["label"], strict=True))) for each in sentences]


def test_tables_by_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line that reads a table, and what is read of the CSV of the last line."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    tables, lists = re.findall(r"^```python\n(.*?)^```", section("Tables"), flags=re.DOTALL | re.MULTILINE)
    *_, write = tables.strip().splitlines()
    inputs = {
        'sep=";"': ("old.csv", 'review;stars\na;1,5\n"b;c";2,5\n', [("a", "1.5"), ("b;c", "2.5")]),
        "escapechar": ("old.csv", 'review,stars\n"a \\"b\\", c",x\n', [('a "b", c', "x")]),
        "skipinitialspace": ("old.csv", 'review, stars\n"a", "x, y"\n', [("a", "x, y")]),
        "skiprows": ("old.csv", 'review,stars\nWhat?,How?\n"{""ImportId"":1}",{}\na,x\n', [("a", "x")]),
        "read_json": ("old.json", '{"review": {"0": "a"}, "stars": {"0": "x"}}', [("a", "x")]),
        "na_values": ("old.csv", "review,stars\na,x\n\\N,y\n", [("a", "x"), ("", "y")]),
    }
    for line in tables.splitlines():
        if not line.startswith("table = "):
            continue
        ((name, content, rows),) = [case for part, case in inputs.items() if part in line]
        Path(name).write_text(content)
        exec(f"import pandas\n{line}\n{write}", {})
        assert [(row["text"], row["label"]) for _, row in TableFile(Path("table.csv")).rows()] == rows
    Path("old.csv").write_text("text,toxic,obscene\na,0,1\nb,0,0\n")
    Path("rows_of_zeros.jsonl").write_text('{"text": "a", "label": [0, 1]}\n{"text": "b", "label": [0.0, 0.0]}\n')
    exec(lists, {})
    for name in ("rows.jsonl", "more.jsonl"):
        assert [row["label"] for _, row in TableFile(Path(name)).rows()] == [["obscene"], []]


def test_words_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table whose sentences have their number in the first row alone, as Kaggle's, or in each; and word/tag."""
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    table, slashes, marks, numbers = re.findall(
        r"^```python\n(.*?)^```", section("Words"), flags=re.DOTALL | re.MULTILINE
    )
    rows = ["Sentence #,Word,POS,Tag", "Sentence: 1,NA,N,B-LOC", ',",",P,O', "Sentence: 2,No,V,O", "Sentence: 2,.,P,O"]
    Path("ner.csv").write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"ner.csv is CSV: make lists .* with .ffill.. if .*converting.md, Words"):
        read_sentences(Path("ner.csv"), labeled=False)
    exec(table, {})
    sentences = [(each.words, each.columns["tags"]) for each in read_sentences(Path("ner.jsonl")).sentences]
    assert sentences == [(["NA", ","], ["B-LOC", "O"]), (["No", "."], ["O", "O"])]
    Path("brown.txt").write_text("a/X 1/2/Y\nb/X\n")
    exec(slashes, {})
    assert [each.words for each in read_sentences(Path("brown.tsv")).sentences] == [["a", "1/2"], ["b"]]
    for mark, line in zip(["B_PER", "PER-B"], marks.splitlines()[1:], strict=True):
        exec(line, names := {"label": mark})
        assert names["label"] == "B-PER"
    exec(numbers, names := {"rows": pandas.DataFrame({"tags": [[0, 2]]})})
    assert names["rows"]["tags"].tolist() == [["O", "I-PER"]]


def test_questions_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"id": "1", "context": "a b", "question": "c", "answers": {"text": ["b"], "answer_start": [2]}}
    for content in ([row], {"data": [row]}):
        Path("questions.json").write_text(json.dumps(content))
        exec(re.search(r"^```python\n(.*?)^```", section("Questions"), flags=re.DOTALL | re.MULTILINE)[1], {})
        assert [each.answers[0].text for each in read_squad(Path("questions.jsonl")).questions] == ["b"]


def test_messages_have_commands_for_the_whole_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is printed is run on the file that it is printed for: a broken byte, and lines that are wrapped at a width."""
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"

    def run(command: str) -> list:
        new.write_bytes(subprocess.run(["bash", "-c", command], input=old.read_bytes(), stdout=subprocess.PIPE).stdout)
        return read(new)

    good = "D\u00e9j\u00e0 vu.\n" * 30
    old.write_bytes(f"{good}caf?\n{good}ASCII\n".encode().replace(b"?", b"\xe9"))
    with pytest.raises(UserError, match=r"line 31 is not UTF-8 .*: 1; .*: 60.: iconv -c") as error:
        read(old)
    assert run(re.search("iconv.*UTF-8 -t UTF-8", str(error.value))[0]) == [f"{good}caf\n{good}ASCII\n"]
    paragraphs = [" ".join(f"word{n * m % 97}" for m in range(60)) + "." for n in range(20)]
    old.write_bytes("\r\n\r\n".join("\r\n".join(textwrap.wrap(each, 66)) for each in paragraphs).encode())
    read(old)
    message = capsys.readouterr().err
    assert "WARNING: most lines are wrapped at 66 characters, and each is read as a paragraph or document" in message
    command = re.search("awk '.*'", message)[0]
    assert command in PAGE
    assert run(command) == [f"{each}\n" for each in paragraphs]
    assert "WARNING" not in capsys.readouterr().err
