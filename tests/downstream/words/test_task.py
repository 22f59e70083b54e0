"""The tasks ``sequence_tagging`` and ``dependency_parsing``: batches, model and files, and the losses of both by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fine_tuning_tasks import build_amos, epoch_ids, set_up
from small_models import logged, nll
from torch import tensor

from amos_fairseq.data import block_iterator
from amos_fairseq.downstream.words.command import most_likely, predict_words
from amos_fairseq.downstream.words.dataset import NO_LABEL, Column
from amos_fairseq.downstream.words.model import TREES, WordOutput
from amos_fairseq.downstream.words.task import (
    DependencyParsingConfig,
    DependencyParsingCriterion,
    SequenceTaggingCriterion,
    SequenceTaggingTask,
)


def make_task(data, split: str, **settings) -> SequenceTaggingTask:
    task = set_up("sequence_tagging", data, tokens_per_sentence=40, **settings)
    task.load_dataset(split)
    return task


def test_batches_of_similar_length(data, monkeypatch):
    """Each sentence occurs once; a batch is a run of a pool sorted by length; the order of the batches is random, the same
    for any number of loader processes and ranks, and on resume, and another in the next epoch."""
    monkeypatch.setattr(block_iterator, "POOL", 5)  # 20 sentences
    task = make_task(data, "train", similar_lengths=True)
    lengths, batches = task.datasets["train"].sizes, epoch_ids(task)
    assert sorted(id for batch in batches for id in batch) == list(range(40))
    assert [len(batch) for batch in batches] == [4] * 10
    task.datasets["train"].set_epoch(1)
    shuffled = task.datasets["train"].ordered_indices().tolist()
    in_order = [sorted(shuffled[first : first + 20], key=lambda id: lengths[id]) for first in (0, 20)]  # stable
    runs = [pool[first : first + 4] for pool in in_order for first in range(0, 20, 4)]
    assert sorted(batches) == sorted(runs)
    assert batches != runs
    assert epoch_ids(task, num_workers=2) == batches
    assert epoch_ids(task, position=3) == batches[3:]
    assert epoch_ids(task, 2) != batches
    # Two ranks of half the batch: each update has the same sentences.
    ranks = [epoch_ids(task, size=2, num_shards=2, shard_id=rank) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == batches
    # What makes no whole batch comes last.
    *whole, rest = epoch_ids(task, size=3)
    assert ({len(batch) for batch in whole}, rest) == ({3}, shuffled[-1:])
    random = epoch_ids(make_task(data, "train"))
    assert [id for batch in random for id in batch] == shuffled


def test_nothing_is_computed_at_padding(data, packings):
    task = make_task(data, "valid")
    sentences, model = task.datasets["valid"], build_amos(task).eval()
    batch = sentences.collater([sentences[index] for index in range(5)])
    model(**batch["net_input"])
    assert [len(packing.slots) for packing in packings] == [sum(sentences.sizes[:5])]
    samples = [sentences[index] for index in range(len(sentences))]
    predict_words(model, "ner_labels", samples, most_likely, "cpu")
    assert len(packings) > 1
    assert all(packing is not None for packing in packings)


def test_the_head_reads_first_pieces_and_is_restored(data):
    """The logits of a word are dropout (off here) and one linear layer of the state at its first piece."""
    task = make_task(data, "valid")
    model = build_amos(task, pooler_dropout=0.3).eval()
    batch = task.datasets["valid"].collater([task.datasets["valid"][index] for index in range(5)])
    logits = model(**batch["net_input"]).logits["ner_labels"]
    states = model.extract_features(batch["net_input"]["src_tokens"])
    for row, positions in enumerate(batch["net_input"]["word_positions"].tolist()):
        for word, position in enumerate(positions):
            expected = torch.nn.functional.linear(states[row, position], *model.word_heads["ner_labels"].parameters())
            torch.testing.assert_close(logits[row, word], expected)
    assert model.word_heads["ner_labels"].dropout.p == 0.3
    assert {parameter.param_group.depth for parameter in model.word_heads["ner_labels"].parameters()} == {0}
    other = build_amos(task)
    other.word_heads = torch.nn.ModuleDict()
    other.register_heads_of(model.state_dict())
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.eval()(**batch["net_input"]).logits["ner_labels"], logits)


LABELS = ["B-X", "I-X", "O"]
# Two sentences: two words; one word, and a second that is cut.
LOGITS = tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], [[0.0, 0.0, 1.0], [9.0, 9.0, 9.0]]])
SAMPLE = {"net_input": {}, "nsentences": 2, "ntokens": 9, "nwords": 3}
SAMPLE |= {"target": tensor([[0, 1], [0, -100]]), "labels": [[0, 1], [0, 2]]}


class Fixed:
    """A model with one output."""

    training = False

    def __init__(self, **logits: torch.Tensor):
        self.output = WordOutput(logits)

    def __call__(self, **net_input) -> WordOutput:
        return self.output


def criterion_of(label_smoothing: float = 0.0, **columns: Column) -> SequenceTaggingCriterion:
    return SequenceTaggingCriterion(SimpleNamespace(columns=columns, views=()), label_smoothing)


def chunk(has_spans: bool = True) -> Column:
    return Column(Path(), "chunk", LABELS, has_spans)


LOSS = nll([2, 0, 1], 0) + nll([0, 3, 0], 1) + nll([0, 0, 1], 0)


def logged_twice(has_spans: bool) -> dict:
    """What fairseq logs after two equal batches."""
    criterion = criterion_of(chunk_labels=chunk(has_spans))
    loss, sample_size, log = criterion(Fixed(chunk_labels=LOGITS), SAMPLE)
    assert float(loss) == pytest.approx(LOSS, rel=1e-6)
    assert sample_size == 3
    values = logged(SequenceTaggingCriterion, log, log)
    assert values["loss"] == pytest.approx(LOSS / 3, abs=1e-4)
    return values


def test_scores_are_logged_with_cut_words_as_wrong():
    """The span is found in the first sentence and missed in the second, whose last word is cut."""
    values = logged_twice(has_spans=True)
    expected = {"accuracy": 50, "precision": 100, "recall": 50, "f1": 66.67}
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    values = logged_twice(has_spans=False)
    assert values["accuracy"] == 50
    assert "f1" not in values


def test_label_smoothing_spreads_a_share_over_all_labels():
    """In training (1 - e) nll of the label + e / 3 times the sum of all three; in validation nothing is spread."""
    criterion, model = criterion_of(0.1, chunk_labels=chunk()), Fixed(chunk_labels=LOGITS)
    assert float(criterion(model, SAMPLE)[0]) == pytest.approx(LOSS, rel=1e-6)
    model.training = True
    words = ([2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0])
    expected = 0.9 * LOSS + 0.1 / 3 * sum(nll(logits, label) for logits in words for label in range(3))
    assert float(criterion(model, SAMPLE)[0]) == pytest.approx(expected, rel=1e-6)
    assert not any(key.startswith("_count_") for key in criterion(model, SAMPLE)[2])


def test_several_columns_are_logged_by_name():
    """The first column as above, the second has one word of two right; the average is that of F1 and accuracy."""
    upos = Column(Path(), "upos", ["A", "B", "C"], has_spans=False)
    criterion = criterion_of(chunk_labels=chunk(), upos_labels=upos)
    parts = {"chunk_labels": SAMPLE, "upos_labels": {"target": tensor([[2, 1]]), "labels": [[2, 1]]}}
    model = Fixed(chunk_labels=LOGITS, upos_labels=tensor([[[0.0, 0.0, 2.0], [0.0, 0.0, 2.0]]]))
    loss, size, log = criterion(model, SAMPLE | {"parts": parts, "nwords": 5})
    assert float(loss) == pytest.approx(LOSS + nll([0, 0, 2], 2) + nll([0, 0, 2], 1), rel=1e-6)
    assert size == 5
    values = logged(SequenceTaggingCriterion, log)
    expected = {"accuracy_chunk": 50, "f1_chunk": 66.67, "accuracy_upos": 50, "average": 58.33}
    assert {name: values[name] for name in expected} == pytest.approx(expected)


RELATIONS = ["det", "nsubj", "nsubj:pass", "root"]


def test_loss_and_scores_of_trees_by_hand():
    """Three words and a padded slot, a fourth word is cut. The first is right but for its subtype, the second is wrong, the
    third has the right head and a wrong relation."""
    scores = torch.zeros(1, 4, 5, 4)
    scores[0, 2, 1, 0] = 1.0  # the third: head 1, det
    scores[0, 0, 2, 2] = 3.0  # the first word: head 2, nsubj:pass
    scores[0, 1, 1, 3] = 2.0  # the second: head 1, root
    target = torch.tensor([[2 * 4 + 1, 0 * 4 + 3, 1 * 4 + 1, NO_LABEL]])
    model = Fixed(**{TREES: scores})
    criterion = DependencyParsingCriterion(SimpleNamespace(relations=RELATIONS, views=()))
    sample = {"net_input": {}, "target": target, "nwords": 3, "all_words": 4, "ntokens": 5, "nsentences": 1}
    loss, size, log = criterion(model, sample)
    expected = math.log(19 + math.exp(3)) + math.log(19 + math.exp(2)) + math.log(19 + math.exp(1))
    assert (loss.item(), size) == (pytest.approx(expected, rel=1e-6), 3)
    values = logged(DependencyParsingCriterion, log, log)
    assert (values["uas"], values["las"]) == (50, 25)
    assert values["loss"] == pytest.approx(expected / 3, abs=1e-4)
    model.training = True
    assert "_words" not in criterion(model, sample)[2]


def test_the_term_of_views_of_trees_by_hand():
    """Two unlabeled words, one of which is padding; p is uniform over 2 of 4 edges, q over all: KL = ln 2 for each view."""
    scores = torch.zeros(1, 1, 2, 4)
    fixed = torch.full((1, 2, 1, 4), -1e9)
    fixed[..., :2] = 0.0
    views = {"full": torch.zeros(1, 2, 1, 4, requires_grad=True), "forward-backward": torch.ones(1, 2, 1, 4)}
    output = WordOutput({TREES: scores}, {TREES: fixed}, {TREES: views})
    model = type("Model", (), {"training": True, "__call__": lambda self, **_: output})()
    task = SimpleNamespace(relations=RELATIONS, views=tuple(views), cfg=DependencyParsingConfig(data="DATA"))
    criterion = DependencyParsingCriterion(task)
    sample = {"net_input": {"unlabeled": {"word_positions": torch.tensor([[1, 0]])}}, "target": torch.tensor([[3]])}
    sample |= {"nwords": 1, "ntokens": 3, "nsentences": 1, "unlabeled_weight": 1.5, "num_unlabeled_words": 1}
    loss, _, log = criterion(model, sample)
    assert float(loss.detach()) == pytest.approx(math.log(8) + 1.5 * 2 * math.log(2), rel=1e-6)
    values = logged(DependencyParsingCriterion, log)
    expected = {"labeled_loss": math.log(8), "cvt_loss": 2 * math.log(2), "kl_full": math.log(2)}
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-4)
