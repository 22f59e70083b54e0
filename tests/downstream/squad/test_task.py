"""The task ``squad``: its batches over ranks and epochs, its model, and errors."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fairseq.models.roberta import RobertaModel
from omegaconf import OmegaConf
from synthetic_squad import make_squad, prepare_squad, untrained_checkpoint

from amos_fairseq.checkpoints.read import read_state
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


def test_every_window_occurs_once_in_an_epoch(data):
    """One rank: no window is left out, the last batch is smaller; orders differ by epoch, validation keeps the files'."""
    task = make_task(data)
    for split in ("train", "valid"):
        task.load_dataset(split)
    first, second = (epoch_of(task, "train", epoch) for epoch in (1, 2))
    number = len(task.datasets["train"])
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(number))
        assert [len(batch) for batch in epoch[:-1]] == [7] * (number // 7)
    assert first != second
    assert first == epoch_of(task, "train", 1)
    assert [index for batch in epoch_of(task, "valid", 1) for index in batch] == list(range(number))


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


def test_windows_beyond_the_model_are_refused(data):
    task = make_task(data)
    task.load_dataset("train")
    with pytest.raises(UserError, match=r"--tokens-per-window 64 tokens, but .* allows 32"):
        task.get_batch_iterator(task.datasets["train"], max_sentences=4, max_positions=32)
    with pytest.raises(UserError, match="--max-tokens 63 leaves no room"):
        task.get_batch_iterator(task.datasets["train"], max_tokens=63, max_positions=64)
    with pytest.raises(UserError, match="leaves no room for a context"):
        make_task(data, tokens_per_window=35)


def test_second_separator(data):
    task = make_task(data, separator_token=2)
    task.load_dataset("valid")
    assert task.datasets["valid"][0]["tokens"].tolist().count(2) == 3
    with pytest.raises(UserError, match="--separator-token 7 is not </s>: give 2"):
        make_task(data, separator_token=7)


def test_models_without_a_head_are_refused(data, monkeypatch):
    monkeypatch.setattr("fairseq.models.build_model", lambda *given: object.__new__(RobertaModel))
    with pytest.raises(UserError, match="--arch roberta_base has no head for answers"):
        make_task(data).build_model(SimpleNamespace(arch="roberta_base"))


def test_a_checkpoint_of_another_vocabulary_is_refused(data, tmp_path):
    own = read_state(untrained_checkpoint(tmp_path / "own", data))["task_state"]
    make_task(data).load_state_dict(own)
    other = prepare_squad(tmp_path / "other", make_squad(seed=5))
    with pytest.raises(UserError, match="was trained with another dictionary"):
        make_task(other).load_state_dict(own)


def test_directories_without_squad_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        make_task(tmp_path / "absent")
    with pytest.raises(UserError, match=r"squad\.json is missing"):
        make_task(tmp_path)
