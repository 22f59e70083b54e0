"""The scripts of examples/comparison as modules, and a text with GLUE tasks to compare on."""

import sys
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from made_up_glue import WORDS, write_glue, write_rows
from small_checkpoint import small_tokenizer
from tiny_runs import ROOT

sys.path.insert(0, str(ROOT / "examples" / "comparison"))


@pytest.fixture(scope="session")
def comparison_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DATA, 66 blocks of 128 tokens, and GLUE with MRPC and STS-B, of one tokenizer."""
    root = tmp_path_factory.mktemp("comparison data")
    data, glue = root / "text", root / "glue"
    tokenizer = small_tokenizer()
    tokenizer.save(data / "tokenizer")
    dictionary = Dictionary.load(str(data / "tokenizer" / "dict.txt"))
    dictionary.save(str(data / "dict.txt"))
    for split, lines in (("train", 420), ("valid", 20)):
        sentences = [WORDS[line % 12 :] + WORDS[: line % 7] for line in range(lines)]
        encoded = [[dictionary.index(piece) for piece in tokenizer.encode(" ".join(words))] for words in sentences]
        write_rows(data, split, [[*row, dictionary.eos()] for row in encoded])
    write_glue(glue, data, "MRPC", ["0", "1"], {"train": 32, "valid": 16}, pair=True)
    write_glue(glue, data, "STS-B", [], {"train": 32, "valid": 16}, pair=True)
    return data, glue
