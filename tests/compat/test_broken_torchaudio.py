"""A torchaudio that is installed and does not load must not stop ``transformers``."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment

# What a CUDA build does beside a CPU build of torch.
BROKEN = 'raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")\n'
ASK = """
import importlib.util, sys
import amos_fairseq
found = importlib.util.find_spec("torchaudio") is not None
import transformers.audio_utils  # the module of transformers 5 that imports torchaudio
from transformers.utils import is_torchaudio_available
print(found, is_torchaudio_available())
"""


@pytest.mark.parametrize(("code", "expected"), [(BROKEN, "False False"), ("__version__ = '2.11.0'\n", "True True")])
def test_only_a_torchaudio_that_does_not_load_is_hidden(code: str, expected: str, tmp_path: Path):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text(code)
    metadata = tmp_path / "torchaudio-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n")
    (metadata / "RECORD").write_text("torchaudio/__init__.py,,\n")
    result = subprocess.run(
        [sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == expected
