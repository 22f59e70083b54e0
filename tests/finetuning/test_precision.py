"""The precision of a fine-tuning command on each device; a GPU is asked in another process."""

from collections.abc import Callable

import pytest
import torch

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning import session

REFUSED = "(refused)"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    """``device(on_gpu, multiplies)``: what the CPU, or the GPUs, answer; the other ones are not asked."""

    def use(on_gpu: bool, multiplies: bool) -> None:
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a CUDA context was opened"))
        monkeypatch.setattr(session, "gpus_multiply_bf16", lambda: multiplies if on_gpu else 1 / 0)
        monkeypatch.setattr(session, "multiplies_bf16", lambda on_gpu: 1 / 0 if on_gpu else multiplies)

    return use


@pytest.mark.parametrize(
    ("asked", "on_gpu", "multiplies", "expected"),
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
    asked: str, on_gpu: bool, multiplies: bool, expected: str, device: Callable[[bool, bool], None]
) -> None:
    device(on_gpu, multiplies)
    if expected == REFUSED:
        with pytest.raises(UserError, match=f"--precision {asked} needs"):
            session.choose_precision(asked, on_gpu)
    else:
        assert session.choose_precision(asked, on_gpu) == expected
