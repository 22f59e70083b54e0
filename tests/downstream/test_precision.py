"""The precision of a fine-tuning command on each device; a GPU is asked in another process."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from synthetic_glue import session as open_glue
from synthetic_glue import write_pretrained_checkpoint

from amos_fairseq.downstream import session
from amos_fairseq.downstream.session import claim_output_directory
from amos_fairseq.errors import UserError
from amos_fairseq.recipes import PRECISIONS

AUTO = ("--precision", "auto")
REFUSED = "(refused)"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    """``device(on_gpu, supported)``: what the CPU, or the GPUs, answer; the other ones are not asked."""

    def use(on_gpu: bool, supported: bool) -> None:
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a CUDA context was opened"))
        monkeypatch.setattr(session, "gpus_support_bf16", lambda: supported if on_gpu else 1 / 0)
        monkeypatch.setattr(session, "supports_bf16", lambda on_gpu: 1 / 0 if on_gpu else supported)

    return use


@pytest.mark.parametrize(
    ("asked", "on_gpu", "supported", "expected"),
    [
        ("auto", False, True, "bf16"),
        ("auto", False, False, "float32"),
        ("auto", True, True, "bf16"),
        ("auto", True, False, "float32"),
        ("bf16", False, True, "bf16"),
        ("bf16", False, False, "bf16"),
        ("bf16", True, True, "bf16"),
        ("bf16", True, False, REFUSED),
        ("fp16", True, False, "fp16"),
        ("fp16", False, True, REFUSED),
        ("float32", True, True, "float32"),
        ("float32", False, True, "float32"),
    ],
)
def test_every_choice(
    asked: str, on_gpu: bool, supported: bool, expected: str, device: Callable[[bool, bool], None]
) -> None:
    device(on_gpu, supported)
    devices = ("cuda:0",) if on_gpu else ("cpu", "cpu")
    if expected == REFUSED:
        with pytest.raises(UserError, match=f"^--precision {asked} needs"):
            session.choose_precision(asked, devices)
    else:
        assert session.choose_precision(asked, devices) == expected


BEFORE = [
    # the results in OUT, on a GPU, supports bfloat16 in hardware (None: not asked) -> the precision with auto
    ("bf16", False, False, "bf16"),  # emulated
    ("bf16", False, True, "bf16"),
    ("bf16", True, True, "bf16"),
    ("bf16", True, False, r"of bf16, which needs bfloat16 products, and this GPU does not .*: give another --out$"),
    ("float32", False, None, "float32"),
    ("float32", True, None, "float32"),
    ("fp16", True, None, "fp16"),
    ("fp16", False, None, r"its results are of fp16, which needs a GPU: give another --out$"),
]


@pytest.mark.parametrize(("before", "on_gpu", "supported", "expected"), BEFORE)
def test_auto_keeps_the_precision_of_results(
    before: str,
    on_gpu: bool,
    supported: bool | None,
    expected: str,
    device: Callable[[bool, bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the same benchmark: another one in OUT, or another OUT, decides nothing."""
    device(on_gpu, bool(supported))
    if supported is None:
        monkeypatch.setattr(session, "gpus_support_bf16", lambda: pytest.fail("seconds for nothing"))
        monkeypatch.setattr(session, "supports_bf16", lambda on_gpu: pytest.fail("not needed"))
    claim_output_directory(tmp_path, "glue", {"precision": before, "recipe": "amos"})
    claim_output_directory(tmp_path, "squad", {"precision": "bf16" if before == "float32" else "float32"})
    saved, devices = session.saved_precision(tmp_path, "glue"), ("cuda:0",) if on_gpu else ("cpu",)
    if expected in PRECISIONS:
        assert session.choose_precision("auto", devices, saved) == expected
    else:
        with pytest.raises(UserError, match=expected) as refused:
            session.choose_precision("auto", devices, saved)
        assert str(refused.value).startswith(f"{tmp_path / 'glue.setup.json'}: ")
    assert session.saved_precision(tmp_path, "tagging") is None
    assert session.saved_precision(tmp_path / "new", "glue") is None


@pytest.mark.parametrize(("begun", "supported"), [("bf16", False), ("float32", True)])
def test_a_command_continues_on_another_machine(
    begun: str, supported: bool, device: Callable[[bool, bool], None], tmp_path: Path
) -> None:
    """The stored setup of the whole session is that of the second command with auto; a named precision is compared."""
    start, out = write_pretrained_checkpoint(tmp_path / "start"), tmp_path / "out"
    device(False, begun == "bf16")
    first = open_glue(start, out, precision="auto")
    assert first.precision == begun
    claim_output_directory(out, "glue", first.setup(first.recipe.trials))
    device(False, supported)
    second = open_glue(start, out, precision="auto")
    assert second == first
    claim_output_directory(out, "glue", second.setup(second.recipe.trials))

    other = "float32" if begun == "bf16" else "bf16"
    assert open_glue(start, tmp_path / "new", precision="auto").precision == other
    named = open_glue(start, out, precision=other)
    assert named == dataclasses.replace(first, precision=other)
    with pytest.raises(UserError, match=rf"precision: {begun} there, {other} here\): give another --out"):
        claim_output_directory(out, "glue", named.setup(named.recipe.trials))
    assert json.loads((out / "glue.setup.json").read_text(encoding="utf-8"))["precision"] == begun
