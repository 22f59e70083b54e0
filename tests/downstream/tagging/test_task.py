"""The task ``sequence_tagging``: its batches, its model, its files, and errors."""

import threading

import pytest
import torch
from omegaconf import OmegaConf
from synthetic_tagging import prepare_tagging

from amos_fairseq.data import block_iterator
from amos_fairseq.downstream.tagging.command import predict_words
from amos_fairseq.downstream.tagging.task import SequenceTaggingConfig, SequenceTaggingTask
from amos_fairseq.models.amos import AmosConfig

MODEL = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128, "encoder_attention_heads": 2}
MODEL |= {"max_positions": 40, "generator_depths": "1,2", "pooler_dropout": 0.3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_tagging(tmp_path_factory.mktemp("tagging"))


def make_task(data, **settings) -> SequenceTaggingTask:
    values = {"data": str(data), "tokens_per_sentence": 40, "seed": 3, "save_dir": "unused"}
    values |= {"train_subset": "train", "update_freq": [1]} | settings
    return SequenceTaggingTask.setup_task(OmegaConf.merge(OmegaConf.structured(SequenceTaggingConfig), values))


def build(task: SequenceTaggingTask):
    config = OmegaConf.merge(OmegaConf.structured(AmosConfig), MODEL | {"_name": "amos", "max_update": 10})
    return task.build_model(config)


def batches_of(task, epoch, position=0, **settings) -> list[list[int]]:
    """The ids of each batch of an epoch, from a position on."""

    def iterator():
        return task.get_batch_iterator(task.datasets["train"], max_positions=40, epoch=epoch, **settings)

    stopped, resumed = iterator(), iterator()
    if position:
        batches = stopped.next_epoch_itr()
        for _ in range(position):
            next(batches)
        resumed.load_state_dict(stopped.state_dict())
    return [batch["id"].tolist() for batch in resumed.next_epoch_itr()]


def test_batches_of_similar_length(data, monkeypatch):
    """Each sentence occurs once; a batch is a run of a pool sorted by length; the order of the batches is random, the same
    for any number of loader processes and ranks, and on resume, and another in the next epoch."""
    monkeypatch.setattr(block_iterator, "POOL", 5)  # 20 sentences
    task = make_task(data, similar_lengths=True)
    task.load_dataset("train")
    lengths, batches = task.datasets["train"].sizes, batches_of(task, 1, max_sentences=4)
    assert sorted(id for batch in batches for id in batch) == list(range(40))
    assert [len(batch) for batch in batches] == [4] * 10
    task.datasets["train"].set_epoch(1)
    shuffled = task.datasets["train"].ordered_indices().tolist()
    in_order = [sorted(shuffled[first : first + 20], key=lambda id: lengths[id]) for first in (0, 20)]  # stable
    runs = [pool[first : first + 4] for pool in in_order for first in range(0, 20, 4)]
    assert sorted(batches) == sorted(runs)
    assert batches != runs
    assert batches_of(task, 1, max_sentences=4, num_workers=2) == batches
    assert batches_of(task, 1, 3, max_sentences=4) == batches[3:]
    assert batches_of(task, 2, max_sentences=4) != batches
    # Two ranks of half the batch: each update has the same sentences.
    ranks = [batches_of(task, 1, max_sentences=2, num_shards=2, shard_id=rank) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == batches
    # What makes no whole batch comes last.
    *whole, rest = batches_of(task, 1, max_sentences=3)
    assert ({len(batch) for batch in whole}, rest) == ({3}, shuffled[-1:])
    random = [id for batch in batches_of(make_task_with_data(data), 1, max_sentences=4) for id in batch]
    assert random == shuffled


def make_task_with_data(data):
    task = make_task(data)
    task.load_dataset("train")
    return task


def test_nothing_is_computed_at_padding(data, packings):
    task = make_task(data)
    task.load_dataset("valid")
    sentences, model = task.datasets["valid"], build(task).eval()
    batch = sentences.collater([sentences[index] for index in range(5)])
    model(**batch["net_input"])
    assert [len(packing.slots) for packing in packings] == [sum(sentences.sizes[:5])]
    samples = [sentences[index] for index in range(len(sentences))]
    list(predict_words(model, "ner_labels", samples, sentences.pad, "cpu", threading.Event()))
    assert len(packings) > 1
    assert all(packing is not None for packing in packings)


def test_the_head_reads_first_pieces_and_is_restored(data, tmp_path):
    """The logits of a word are dropout (off here) and one linear layer of the state at its first piece."""
    task = make_task(data, save_dir=str(tmp_path))
    task.load_dataset("valid")
    model = build(task).eval()
    batch = task.datasets["valid"].collater([task.datasets["valid"][index] for index in range(5)])
    logits = model(**batch["net_input"]).logits["ner_labels"]
    states = model.extract_features(batch["net_input"]["src_tokens"])
    for row, positions in enumerate(batch["net_input"]["word_positions"].tolist()):
        for word, position in enumerate(positions):
            expected = torch.nn.functional.linear(states[row, position], *model.word_heads["ner_labels"].parameters())
            torch.testing.assert_close(logits[row, word], expected)
    assert model.word_heads["ner_labels"].dropout.p == MODEL["pooler_dropout"]
    assert {parameter.param_group.depth for parameter in model.word_heads["ner_labels"].parameters()} == {0}
    other = build(task)
    other.word_heads = torch.nn.ModuleDict()
    other.register_heads_of(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.eval()(**batch["net_input"]).logits["ner_labels"], logits)
    task.begin_epoch(1, model)
    assert (tmp_path / "labels.txt").read_text().split() == ["B-NAME", "I-NAME", "O"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
