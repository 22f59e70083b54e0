"""Precisions that a device or an optimizer does not support, and what fairseq's settings lack."""

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf

from amos_fairseq.errors import UserError
from amos_fairseq.run.device import choose_precision


def configuration(optimizer: str = "grouped_adam", **common):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": optimizer}
    for name, value in common.items():
        cfg.common[name] = value
    return cfg


@pytest.mark.parametrize(
    ("common", "has_gpu", "message"),
    [
        ({"fp16": True}, False, r"--fp16 needs a GPU: on a CPU use --bf16, or float32"),
        ({"amp": True}, False, r"--amp needs a GPU"),
        ({"fp16": True, "bf16": True}, True, r"--fp16 and --bf16 exclude each other"),
        ({"fp16": True, "amp": True}, True, r"--fp16 and --amp exclude each other"),
        ({"fp16": True, "memory_efficient_fp16": True}, True, r"--memory-efficient-fp16 keeps .* use --fp16"),
        ({"bf16": True, "memory_efficient_bf16": True}, False, r"--memory-efficient-bf16 keeps .* use --bf16"),
    ],
)
def test_precisions_that_are_refused(common: dict, has_gpu: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_precision(configuration(**common), has_gpu)


@pytest.mark.parametrize(
    ("optimizer", "common", "has_gpu", "flat"),
    [
        ("grouped_adam", {"fp16": True}, True, False),
        ("adam", {"fp16": True}, True, True),
        ("grouped_adam", {"bf16": True}, False, True),
        ("grouped_adam", {}, False, True),
        ("adam", {"fp16": True, "memory_efficient_fp16": True}, True, True),
    ],
)
def test_parameter_groups_survive_fp16(optimizer: str, common: dict, has_gpu: bool, flat: bool) -> None:
    """fairseq's flat float32 masters lose the groups; bf16 is never flat, for any setting."""
    cfg = configuration(optimizer, **common)
    choose_precision(cfg, has_gpu)
    assert cfg.common.fp16_no_flatten_grads is not flat


@pytest.mark.parametrize("optimizer", ["grouped_adam", "adam"])
def test_a_gpu_without_bfloat16_is_refused(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    choose_precision(configuration(optimizer, bf16=True), has_gpu=False)  # a CPU has it
    choose_precision(configuration(optimizer, fp16=True), has_gpu=True)
    with pytest.raises(UserError, match=r"--bf16 is not supported by this GPU: use --fp16"):
        choose_precision(configuration(optimizer, bf16=True), has_gpu=True)
