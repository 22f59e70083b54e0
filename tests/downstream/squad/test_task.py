"""The task ``squad``: its batches over ranks and epochs, its model, and errors."""

import threading
from collections import Counter

import pytest
import torch
from omegaconf import OmegaConf
from synthetic_squad import make_squad, prepare_squad

from amos_fairseq.downstream.squad.command import DecodingLimits, predict_answers
from amos_fairseq.downstream.squad.model import IndependentSpanHead, JointSpanHead
from amos_fairseq.downstream.squad.task import SquadConfig, SquadTask
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


def epoch_of(task: SquadTask, split: str, epoch: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    settings = {"max_sentences": 7, "max_positions": 64, "num_shards": ranks, "shard_id": rank}
    iterator = task.get_batch_iterator(task.datasets[split], epoch=epoch, **settings)
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr() if batch]


def test_several_ranks_share_whole_updates(data):
    """Two ranks read the same as one rank with two micro-batches, update by update; the omitted windows differ by epoch."""
    left_out = []
    for epoch in (1, 2):
        ranks = []
        for rank in (0, 1):
            task = make_task(data)
            task.load_dataset("train")
            ranks.append(epoch_of(task, "train", epoch, rank, ranks=2))
        single = make_task(data, update_freq=[2])
        single.load_dataset("train")
        alone = epoch_of(single, "train", epoch)
        updates = [Counter(alone[place] + alone[place + 1]) for place in range(0, len(alone), 2)]
        assert updates == [Counter(a + b) for a, b in zip(*ranks, strict=True)]
        left_out.append(set(range(len(single.datasets["train"]))) - {index for batch in alone for index in batch})
        assert len(left_out[-1]) == len(single.datasets["train"]) % 14
    assert left_out[0] != left_out[1]


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


def test_a_head_of_the_other_kind_is_newly_initialized(data):
    """The encoder of a fine-tuned checkpoint is taken, its head of other shapes is not."""
    independent, joint = (build(make_task(data, span_head=kind)) for kind in ("independent", "joint"))
    fresh = joint.span_head.start.weight.clone()
    state = {name: value + 1 for name, value in independent.state_dict().items()}
    joint.load_state_dict(state, strict=True)
    assert torch.equal(joint.span_head.start.weight, fresh)
    assert torch.equal(joint.encoder.embed_positions.weight, independent.encoder.embed_positions.weight + 1)


def test_nothing_is_computed_at_padding(data, packings):
    task = make_task(data)
    task.load_dataset("valid")
    windows, model = task.datasets["valid"], build(task).eval()
    model(**windows.collater([windows[index] for index in range(5)])["net_input"])
    assert [len(packing.slots) for packing in packings] == [sum(windows.sizes[:5])]
    predict_answers(model, windows, "cpu", DecodingLimits(), threading.Event())
    assert len(packings) > 1
    assert any(packings[1:])


def test_refusals(data, tmp_path):
    for directory, settings, message in (
        (tmp_path / "absent", {}, "is not a directory"),
        (tmp_path, {}, r"squad\.json is missing"),
        (data, {"tokens_per_window": 35}, "leaves no room for a context"),
        (data, {"separator_token": 7}, "--separator-token 7 is not </s>: give 2"),
    ):
        with pytest.raises(UserError, match=message):
            make_task(directory, **settings)
    task = make_task(data, separator_token=2)
    task.load_dataset("valid")
    assert task.datasets["valid"][0]["tokens"].tolist().count(2) == 3
    with pytest.raises(UserError, match=r"--tokens-per-window 64 tokens, but .* allows 32"):
        task.get_batch_iterator(task.datasets["valid"], max_sentences=4, max_positions=32)
