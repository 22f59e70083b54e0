"""The objective of labeled texts by hand, and its logged scores beside scikit-learn and scipy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import tensor

from amos_fairseq.downstream.classification.task import TextClassificationCriterion


def logged_in_batches(
    kind, logits, target, sizes, training=False, together=False, **record
) -> tuple[list[float], dict[str, float]]:
    """The losses of batches of these sizes, and what fairseq logs after them; as the trainer does, a value of one element is
    passed as a number. ``together``: as batches of several ranks."""
    criterion = TextClassificationCriterion(SimpleNamespace(record={"kind": kind} | record))
    losses, first, of_a_rank = [], 0, []
    with metrics.aggregate(new_root=True) as aggregated:
        for own, own_target in zip(logits.split(sizes), target.split(sizes), strict=True):
            model = type("Model", (), {"training": training, "__call__": lambda self, own=own, **_: (own, None)})()
            rows = torch.arange(first, first + len(own)).flip(0)
            first += len(own)
            sample = {"net_input": {}, "nsentences": len(own), "ntokens": 9, "id": rows, "num_rows": len(logits)}
            sample["target"] = own_target
            loss, sample_size, log = criterion(model, sample)
            assert sample_size == len(own)
            losses.append(float(loss))
            log = {name: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for name, v in log.items()}
            of_a_rank.append(log)
            if not together:
                criterion.reduce_metrics([log])
        if together:
            assert criterion.logging_outputs_can_be_summed()
            criterion.reduce_metrics(of_a_rank)
    return losses, dict(aggregated.get_smoothed_values())


def test_classes_by_hand():
    """A row whose class the training set lacks (-1) has no loss and is wrong."""
    logits = tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    losses, values = logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [3, 1])
    nll = [math.log(sum(map(math.exp, row))) - row[i] for row, i in zip(logits.tolist(), (0, 2, 2), strict=False)]
    assert losses == pytest.approx([sum(nll), 0], rel=1e-6)
    assert values["loss"] == pytest.approx(sum(nll) / 4, abs=1e-4)
    assert values["accuracy"] == 50
    # F1 of class 0: 2/3, of 1: 0 (predicted once), of 2: 2/3, of the unknown class: 0.
    assert values["macro_f1"] == pytest.approx(100 * (2 / 3 + 2 / 3) / 4, abs=1e-3)
    assert values["matthews"] == pytest.approx(100 * matthews_corrcoef([0, 2, 2, -1], [0, 1, 2, 0]), abs=1e-3)
    for together in (False, True):
        sums = logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [2, 2], together=together)[1]
        assert (sums["accuracy"], sums["matthews"]) == (values["accuracy"], values["matthews"])
    assert "accuracy" not in logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [4], training=True)[1]


def test_labels_by_hand():
    logits = tensor([[2.0, -1.0], [-3.0, 0.5], [1.0, 1.0]])
    target = tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    losses, values = logged_in_batches("labels", logits, target.bool(), [2, 1])
    rows = zip(logits.tolist(), target.tolist(), strict=True)
    bce = [[math.log1p(math.exp(-x if y else x)) for x, y in zip(*row, strict=True)] for row in rows]
    assert losses == pytest.approx([sum(map(sum, bce[:2])) / 2, sum(bce[2]) / 2], rel=1e-6)
    assert values["micro_f1"] == pytest.approx(100 * 2 * 2 / (2 * 2 + 2), abs=1e-3)  # two right, two wrong, none missed
    assert values["macro_f1"] == pytest.approx(100 * (1 + 0) / 2, abs=1e-3)
    used = f1_score(target.numpy(), logits.numpy() > 0, average="micro")
    assert values["micro_f1"] == pytest.approx(100 * used, abs=1e-3)


def test_numbers_by_hand():
    logits, target = tensor([[1.0], [5.0], [2.0], [9.0]]), tensor([2.0, 4.0, 1.0, 30.0])
    losses, values = logged_in_batches("number", logits, target, [1, 3], deviation=2.0, mean=3.0)
    assert losses == pytest.approx([1 / 4, (1 + 1 + 441) / 4])
    outputs = logits[:, 0].numpy()
    expected = {"spearman": spearmanr, "pearson": pearsonr}
    for name, measure in expected.items():
        assert values[name] == pytest.approx(100 * measure(outputs, target.numpy())[0], abs=1e-3)
    assert values["mse"] == pytest.approx(float(np.square(outputs - target.numpy()).mean()), rel=1e-4)
