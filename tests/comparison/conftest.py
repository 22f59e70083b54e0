"""The scripts of examples/comparison as modules, and a text with GLUE tasks to compare on."""

import sys
from pathlib import Path

import pytest
from synthetic_glue import write_glue, write_pretraining_data
from tiny_runs import ROOT

sys.path.insert(0, str(ROOT / "examples" / "comparison"))


@pytest.fixture(scope="session")
def comparison_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DATA, 66 blocks of 128 tokens, and GLUE with MRPC and STS-B, of one tokenizer."""
    root = tmp_path_factory.mktemp("comparison data")
    data, glue = root / "text", root / "glue"
    write_pretraining_data(data)
    write_glue(glue, data, "MRPC", ["0", "1"], {"train": 32, "valid": 16}, pair=True)
    write_glue(glue, data, "STS-B", [], {"train": 32, "valid": 16}, pair=True)
    return data, glue
