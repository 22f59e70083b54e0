"""The task ``squad``: its batches over ranks and epochs, its model, and errors."""

import pytest
import torch
from omegaconf import OmegaConf
from synthetic_squad import make_squad, prepare_squad

from amos_fairseq.downstream.squad.task import IndependentSpanHead, JointSpanHead, SquadConfig, SquadTask
from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosConfig

MODEL = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128, "encoder_attention_heads": 2}
MODEL |= {"max_positions": 64, "generator_depths": "1,2"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_squad(tmp_path_factory.mktemp("squad"), make_squad())


def make_task(data, **settings) -> SquadTask:
    values = {"data": str(data), "tokens_per_window": 64, "doc_stride": 16, "max_question_length": 32, "seed": 3}
    values |= {"save_dir": "unused", "train_subset": "train", "update_freq": [1]} | settings
    return SquadTask.setup_task(OmegaConf.merge(OmegaConf.structured(SquadConfig), values))


def build(task: SquadTask):
    config = OmegaConf.merge(OmegaConf.structured(AmosConfig), MODEL | {"_name": "amos", "max_update": 10})
    return task.build_model(config)


@pytest.mark.parametrize(("kind", "head"), [("independent", IndependentSpanHead), ("joint", JointSpanHead)])
def test_head_is_built_and_restored_from_a_checkpoint(data, kind, head):
    task = make_task(data, span_head=kind)
    model = build(task)
    assert isinstance(model.span_head, head)
    other = build(make_task(data, span_head="joint" if kind == "independent" else "independent"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other.register_heads_of(state)
    assert isinstance(other.span_head, head)
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    # Of a checkpoint with a head of other shapes only the encoder is taken.
    third = build(make_task(data, span_head="joint" if kind == "independent" else "independent"))
    fresh = [parameter.clone() for parameter in third.span_head.parameters()]
    third.load_state_dict({name: value + 1 for name, value in state.items()}, strict=True)
    assert all(map(torch.equal, third.span_head.parameters(), fresh))
    assert torch.equal(third.encoder.embed_positions.weight, model.encoder.embed_positions.weight + 1)


def test_a_second_separator(data):
    with pytest.raises(UserError, match="--separator-token 7 is not </s>: give 2"):
        make_task(data, separator_token=7)
    task = make_task(data, separator_token=2)
    task.load_dataset("valid")
    assert task.datasets["valid"][0]["tokens"].tolist().count(2) == 3
    with pytest.raises(UserError, match=r"--tokens-per-window 64 tokens, but .* allows 32"):
        task.get_batch_iterator(task.datasets["valid"], max_sentences=4, max_positions=32)
