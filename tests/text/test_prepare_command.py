"""The command line of ``amos prepare``: the kind, the output directory, and names that UTF-8 cannot represent."""

import os
from pathlib import Path

import pytest
from failures import error_line
from preparing import prepare

from amos_fairseq.cli.main import build_parser

ABC = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "kind", "values"),
    [
        (["my.txt", "--out", "D"], "text", {"text": [Path("my.txt")], "out": Path("D")}),
        (["text", "text", "--out", "D"], "text", {"text": [Path("text")]}),
        (["./glue", "--out", "D"], "text", {"text": [Path("glue")]}),
        (["glue", *ABC, "D"], "glue", {"tasks": "b", "out": Path("D")}),
        (["squad", "--out", "D", *ABC], "squad", {"dev": Path("b"), "out": Path("D")}),
        (["probing", "D", "--chunks", "a", "b"], "probing", {"chunks": [Path("a"), Path("b")], "out": Path("D")}),
    ],
)
def test_the_first_word_is_a_kind_if_it_is_the_name_of_one(tmp_path, monkeypatch, arguments, kind, values):
    """Also where files have these names."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "glue"):
        Path(name).touch()
    given = build_parser().parse_args(["prepare", *arguments])
    assert given.kind == kind
    assert {name: getattr(given, name) for name in values} == values


@pytest.mark.parametrize("command", ["text", "text to", "squad"])
def test_names_that_are_not_utf8_are_refused(tmp_path, capsys, command):
    folder = os.fsencode(tmp_path)
    name = folder + b"/b\xe9.txt"
    with open(name, "w") as file:
        file.write("text\n")
    path, out = os.fsdecode(name), str(tmp_path / "out")
    arguments = {
        "text": [path, "--out", out, "--vocab-size", "100"],
        "text to": [__file__, "--out", os.fsdecode(folder + b"/out\xe9"), "--vocab-size", "100"],
        "squad": [path, path, "tokenizer", out],
    }[command]
    assert "is not UTF-8: rename it" in error_line(capsys, prepare(command.partition(" ")[0]), *arguments)
    assert os.listdir(folder) == [b"b\xe9.txt"]
