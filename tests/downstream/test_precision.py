"""The precision of a fine-tuning command: that of the results that it continues, or what the device can do."""

import pytest
from synthetic_glue import session as open_glue
from synthetic_glue import write_pretrained_checkpoint

from amos_fairseq.downstream import session
from amos_fairseq.downstream.session import claim_output_directory
from amos_fairseq.errors import UserError
from amos_fairseq.recipes import PRECISIONS

# asked, of the results in OUT, on a GPU, whether it supports bfloat16 -> precision or message; choose() has its own tests
CASES = [
    ("auto", None, False, True, "bf16"),
    ("auto", None, True, False, "float32"),
    ("bf16", None, True, False, "^--precision bf16 needs"),
    ("auto", "bf16", False, False, "bf16"),  # emulated
    ("auto", "fp16", False, True, r"in fp16, and fp16 needs a GPU: give another --out$"),
]


@pytest.mark.parametrize(("asked", "before", "on_gpu", "supported", "expected"), CASES)
def test_choices(asked, before, on_gpu, supported, expected, tmp_path, monkeypatch):
    """Results of another benchmark in OUT decide nothing."""
    monkeypatch.setattr(session, "gpus_support_bf16", lambda: supported)
    monkeypatch.setattr(session, "supports_bf16", lambda on_gpu: supported)
    if before is not None:
        claim_output_directory(tmp_path, "glue", {"precision": before, "recipe": "amos"})
    claim_output_directory(tmp_path, "squad", {"precision": "float32"})
    saved, devices = session.saved_precision(tmp_path, "glue"), ("cuda:0",) if on_gpu else ("cpu", "cpu")
    if expected in PRECISIONS:
        assert session.choose_precision(asked, devices, saved) == expected
    else:
        with pytest.raises(UserError, match=expected):
            session.choose_precision(asked, devices, saved)


def test_auto_continues_the_setup_of_another_machine(tmp_path, monkeypatch):
    start, out = write_pretrained_checkpoint(tmp_path / "start"), tmp_path / "out"
    for supported in (True, False):
        monkeypatch.setattr(session, "supports_bf16", lambda on_gpu, supported=supported: supported)
        opened = open_glue(start, out, precision="auto")
        assert opened.precision == "bf16"
        claim_output_directory(out, "glue", opened.setup(opened.recipe.trials))
    named = open_glue(start, out, precision="float32")
    with pytest.raises(UserError, match=r"precision: bf16 there, float32 here\): give another --out"):
        claim_output_directory(out, "glue", named.setup(named.recipe.trials))
