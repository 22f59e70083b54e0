"""Precisions by flags and through Hydra, and precisions that a device or an optimizer does not support."""

import pytest
import torch
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

import amos_fairseq  # noqa: F401  (patches fairseq)
from amos_fairseq.compat.precision import choose_precision
from amos_fairseq.errors import UserError

FLAGS = ["DATA", "--task", "text_pretraining", "--arch", "amos_tiny", "--criterion", "amos", "--optimizer", "grouped_adam",
         "--batch-size", "4", "--lr", "0.001"]  # fmt: skip


def configuration(optimizer: str = "grouped_adam", **common):
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": optimizer}
    for name, value in common.items():
        cfg.common[name] = value
    return cfg


def parse(*flags: str):
    return options.parse_args_and_arch(options.get_training_parser(), [*FLAGS, *flags])


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-bf16"])
def test_bf16_flag_does_not_mean_tpu(flag: str) -> None:
    """Stock fairseq sets tpu with every --bf16 and dies without XLA."""
    cfg = convert_namespace_to_omegaconf(parse(flag))
    assert cfg.common.bf16
    assert not cfg.common.tpu
    assert convert_namespace_to_omegaconf(parse("--bf16", "--tpu")).common.tpu
    assert not parse().bf16


def test_two_precisions_on_the_command_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--bf16", "--fp16")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "amos_fairseq: error: --fp16 and --bf16 exclude each other: choose one\n"


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
