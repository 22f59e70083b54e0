"""The objective of sequence tagging and its logged values by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_models import logged
from torch import tensor

from amos_fairseq.downstream.tagging.dataset import Column
from amos_fairseq.downstream.tagging.model import WordOutput
from amos_fairseq.downstream.tagging.task import SequenceTaggingCriterion

LABELS = ["B-X", "I-X", "O"]
# Two sentences: two words; one word, and a second that is cut.
LOGITS = tensor([[[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], [[0.0, 0.0, 1.0], [9.0, 9.0, 9.0]]])
SAMPLE = {"net_input": {}, "nsentences": 2, "ntokens": 9, "nwords": 3}
SAMPLE |= {"target": tensor([[0, 1], [0, -100]]), "labels": [[0, 1], [0, 2]]}


class Fixed:
    """A model with one output."""

    training = False

    def __init__(self, output: WordOutput):
        self.output = output

    def __call__(self, **net_input) -> WordOutput:
        return self.output


def nll(logits: list[float], place: int) -> float:
    return math.log(sum(map(math.exp, logits))) - logits[place]


LOSS = nll([2, 0, 1], 0) + nll([0, 3, 0], 1) + nll([0, 0, 1], 0)


def logged_twice(has_spans: bool) -> dict:
    """What fairseq logs after two equal batches."""
    column = Column(Path(), "chunk", LABELS, has_spans)
    task = SimpleNamespace(columns={"chunk_labels": column}, views=())
    criterion = SequenceTaggingCriterion(task, label_smoothing=0.0)
    loss, sample_size, log = criterion(Fixed(WordOutput({"chunk_labels": LOGITS})), SAMPLE)
    assert float(loss) == pytest.approx(LOSS, rel=1e-6)
    assert sample_size == 3
    values = logged(SequenceTaggingCriterion, log, log)
    assert set(criterion.of_validation) == values.keys() - {"loss"} - {key for key in values if key[0] == "_"}
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
    column = Column(Path(), "chunk", LABELS, has_spans=True)
    criterion = SequenceTaggingCriterion(
        SimpleNamespace(columns={"chunk_labels": column}, views=()), label_smoothing=0.1
    )
    model = Fixed(WordOutput({"chunk_labels": LOGITS}))
    assert float(criterion(model, SAMPLE)[0]) == pytest.approx(LOSS, rel=1e-6)
    model.training = True
    words = [([2.0, 0.0, 1.0], 0), ([0.0, 3.0, 0.0], 1), ([0.0, 0.0, 1.0], 0)]
    expected = sum(
        0.9 * nll(logits, label) + 0.1 / 3 * sum(nll(logits, each) for each in range(3)) for logits, label in words
    )
    assert float(criterion(model, SAMPLE)[0]) == pytest.approx(expected, rel=1e-6)
    assert not any(key.startswith("_count_") for key in criterion(model, SAMPLE)[2])


def test_several_columns_are_logged_by_name():
    """The first column as above, the second has one word of two right; the average is that of F1 and accuracy."""
    columns = {
        "chunk_labels": Column(Path(), "chunk", LABELS, has_spans=True),
        "upos_labels": Column(Path(), "upos", ["A", "B", "C"], has_spans=False),
    }
    criterion = SequenceTaggingCriterion(SimpleNamespace(columns=columns, views=()), label_smoothing=0.0)
    upos = {"target": tensor([[2, 1]]), "labels": [[2, 1]]}
    parts = {"chunk_labels": SAMPLE, "upos_labels": upos}
    output = WordOutput({"chunk_labels": LOGITS, "upos_labels": tensor([[[0.0, 0.0, 2.0], [0.0, 0.0, 2.0]]])})
    loss, size, log = criterion(Fixed(output), SAMPLE | {"parts": parts, "nwords": 5})
    assert float(loss) == pytest.approx(LOSS + nll([0, 0, 2], 2) + nll([0, 0, 2], 1), rel=1e-6)
    assert size == 5
    values = logged(SequenceTaggingCriterion, log)
    expected = {"accuracy_chunk": 50, "f1_chunk": 66.67, "accuracy_upos": 50, "average": 58.33}
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert set(expected) < set(criterion.of_validation)
