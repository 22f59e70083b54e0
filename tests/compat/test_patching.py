"""Functions of modules, classes and fairseq's training script are replaced, each once; the start and end of a process."""

import queue
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fairseq import trainer
from fairseq.data.iterators import BackgroundConsumer
from forked_command import run_module
from tiny_runs import ROOT
from torch import nn

import amos_fairseq
from amos_fairseq.compat import PATCHES
from amos_fairseq.compat.patching import Patch, Script, patch_training_script, stop_readers
from amos_fairseq.run.hooks import REPLACED

ALL = [*(patch for patches in PATCHES.values() for patch in patches), *REPLACED]


def test_each_function_is_replaced_once() -> None:
    """Also in fact: what a replacement calls is not ours."""
    functions = [(patch.owner, patch.name) for patch in ALL]
    assert len(set(functions)) == len(functions)
    for owner, name in functions:
        if not isinstance(owner, Script):  # replaced where it runs
            attribute = getattr(owner, name)
            replaced = getattr(attribute, "fget", attribute)
            assert is_ours(replaced)
            assert not is_ours(getattr(replaced, "__wrapped__", None))  # a class has none


def is_ours(function: Any) -> bool:
    return getattr(function, "__code__", "no function") in Patch.apply_to.__code__.co_consts


def test_a_training_script_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module may have two names, and a sweep creates several trainers."""
    names = {patch.name for patch in ALL if patch.owner is Script.TRAINING}
    assert names == {"train", "validate", "validate_and_save"}
    script = ModuleType("script")
    stock = {name: lambda *args: None for name in names}
    vars(script).update(stock)
    for name in ("fairseq_cli.train", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, script)
    for _ in range(2):
        patch_training_script()
    assert {name: getattr(script, name).__wrapped__ for name in names} == stock


# As a CUDA build beside a CPU build of torch.
BROKEN = 'raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")\n'
ASK = """
import importlib.util, sys
sys.path.append(sys.argv[1])
import amos_fairseq
found = importlib.util.find_spec("torchaudio") is not None
import transformers.audio_utils  # the module of transformers 5 that imports torchaudio
from transformers.utils import is_torchaudio_available
print(found, is_torchaudio_available())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "expected"), [(BROKEN, "False False"), ("__version__ = '2.11.0'\n", "True True")])
def test_only_a_torchaudio_that_does_not_load_is_hidden(code: str, expected: str, tmp_path: Path):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text(code)
    metadata = tmp_path / "torchaudio-2.11.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n")
    (metadata / "RECORD").write_text("torchaudio/__init__.py,,\n")
    (tmp_path / "ask.py").write_text(ASK)
    result = run_module("ask", [str(ROOT)], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == expected


@pytest.mark.parametrize("size", [0, 1], ids=["reads", "waits for space"])
def test_background_readers_end(size: int) -> None:
    """fairseq's own thread, over a source that has no end and takes its time when it is closed."""

    def endless() -> Any:
        try:
            while True:
                yield 1
                time.sleep(0.01)
        finally:
            time.sleep(0.3)

    reader = BackgroundConsumer(queue.Queue(size), endless(), None, None)
    reader.start()
    time.sleep(0.1)
    stop_readers()
    assert not reader.is_alive()


def test_scores_are_imported_when_they_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With modules of the standard library, which this process may import twice; and TensorBoard, where it is installed."""
    pytest.importorskip("tensorboard")
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(amos_fairseq, "SCORES", ("xml", "xml.dom", "colorsys"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("xml", "colorsys")]:
        monkeypatch.delitem(sys.modules, name)
    with amos_fairseq.scores_imported_later():
        from colorsys import rgb_to_hsv
        from xml import dom

        from torch.utils.tensorboard import SummaryWriter
    assert "torch.utils.tensorboard" not in sys.modules
    assert "colorsys" not in sys.modules
    assert "xml" not in sys.modules
    assert rgb_to_hsv(0.2, 0.4, 0.4) == (0.5, 0.5, 0.4)
    assert dom.registerDOMImplementation("a", str) is None
    assert "colorsys" in sys.modules
    assert hasattr(sys.modules["xml.dom"], "Node")
    SummaryWriter(str(tmp_path / "log")).close()
    assert "torch.utils.tensorboard" in sys.modules


def test_absent_biases_are_not_shared() -> None:
    tied, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model = nn.Sequential(tied, other, nn.Sequential(tied, nn.Linear(2, 2)))
    assert trainer._catalog_shared_params(model) == [["0.weight", "2.0.weight"]]
