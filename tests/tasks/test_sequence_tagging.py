"""The task ``sequence_tagging``: its batches, its model, its files, and errors."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models.roberta import RobertaModel
from omegaconf import OmegaConf
from synthetic_tagging import prepare_tagging

from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosConfig
from amos_fairseq.tasks.sequence_tagging import SequenceTaggingConfig, SequenceTaggingTask

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


def test_every_sentence_occurs_once_in_an_epoch(data, caplog):
    task = make_task(data)
    with caplog.at_level("INFO"):
        for split in ("train", "valid"):
            task.load_dataset(split)
    assert "are cut" in caplog.text
    for split, epochs in (("train", (1, 2)), ("valid", (1, 1))):
        orders = []
        for epoch in epochs:
            iterator = task.get_batch_iterator(task.datasets[split], max_sentences=7, max_positions=40, epoch=epoch)
            orders.append([index for batch in iterator.next_epoch_itr() for index in batch["id"].tolist()])
        assert all(sorted(order) == list(range(40)) for order in orders)
        assert (orders[0] != orders[1]) == (split == "train")
    with pytest.raises(UserError, match="--tokens-per-sentence 40"):
        task.get_batch_iterator(task.datasets["train"], max_sentences=7, max_positions=39)


def test_the_head_reads_first_pieces_and_is_restored(data, tmp_path):
    """The logits of a word are dropout (off here) and one linear layer of the state at its first piece."""
    task = make_task(data, save_dir=str(tmp_path))
    task.load_dataset("valid")
    model = build(task).eval()
    batch = task.datasets["valid"].collater([task.datasets["valid"][index] for index in range(5)])
    logits = model(**batch["net_input"])
    states = model.extract_features(batch["net_input"]["src_tokens"])
    for row, positions in enumerate(batch["net_input"]["word_positions"].tolist()):
        for word, position in enumerate(positions):
            expected = torch.nn.functional.linear(states[row, position], *model.tagging_head.parameters())
            torch.testing.assert_close(logits[row, word], expected)
    assert model.tagging_head.dropout.p == MODEL["pooler_dropout"]
    assert {parameter.param_group.depth for parameter in model.tagging_head.parameters()} == {0}
    other = build(task)
    del other.tagging_head
    other.tagging_head = None
    other.register_heads_of(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.eval()(**batch["net_input"]), logits)
    task.begin_epoch(1, model)
    assert (tmp_path / "labels.txt").read_text().split() == ["B-NAME", "I-NAME", "O"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


def test_what_cannot_be_used_is_refused(data, tmp_path, monkeypatch):
    for directory, message in ((tmp_path / "absent", "is not a directory"), (tmp_path, r"tagging\.json is missing")):
        with pytest.raises(UserError, match=message):
            make_task(directory)
    monkeypatch.setattr("fairseq.tasks.FairseqTask.build_model", lambda *_: RobertaModel.__new__(RobertaModel))
    with pytest.raises(UserError, match="has no head for labels"):
        make_task(data).build_model(SimpleNamespace(arch="roberta_base"))
