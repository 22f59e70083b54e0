"""Precisions by flags."""

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import amos_fairseq  # noqa: F401  (patches fairseq)

FLAGS = (
    "DATA --task text_pretraining --arch amos_tiny --criterion amos --optimizer grouped_adam --batch-size 4 --lr 0.001"
)


def parse(*flags: str):
    return options.parse_args_and_arch(options.get_training_parser(), [*FLAGS.split(), *flags])


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-bf16"])
def test_bf16_flag_does_not_mean_tpu(flag: str) -> None:
    """Stock fairseq sets tpu with every --bf16 and dies without XLA."""
    cfg = convert_namespace_to_omegaconf(parse(flag))
    assert cfg.common.bf16
    assert not cfg.common.tpu
    assert convert_namespace_to_omegaconf(parse("--bf16", "--tpu")).common.tpu
    assert not parse().bf16
