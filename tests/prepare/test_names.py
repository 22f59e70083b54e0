"""Names of input files that UTF-8 cannot represent: every preparation refuses them before it works."""

import os

import pytest
from failures import error_line

from amos_fairseq.preprocess.pretraining import prepare as text
from amos_fairseq.preprocess.probing import prepare as probing
from amos_fairseq.preprocess.squad import prepare as squad
from amos_fairseq.preprocess.tagging import prepare as tagging


@pytest.mark.parametrize("command", ["text", "text to", "probing", "squad", "tagging"])
def test_names_that_are_not_utf8_are_refused(tmp_path, capsys, command):
    folder = os.fsencode(tmp_path)
    name = folder + b"/b\xe9.txt"
    with open(name, "w") as file:
        file.write("a B-NP\n")
    path, out = os.fsdecode(name), str(tmp_path / "out")
    main, arguments = {
        "text": (text.main, [path, "--out", out, "--vocab-size", "100"]),
        "text to": (text.main, [__file__, "--out", os.fsdecode(folder + b"/out\xe9"), "--vocab-size", "100"]),
        "probing": (probing.main, [out, "--chunks", path, path]),
        "squad": (squad.main, [path, path, "tokenizer", out]),
        "tagging": (tagging.main, [path, path, "tokenizer", out]),
    }[command]
    assert "is not UTF-8: rename it" in error_line(capsys, main, *arguments)
    assert os.listdir(folder) == [b"b\xe9.txt"]
