"""The objective of dependency parsing by hand, and its logged scores."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics

from amos_fairseq.criterions.dependency_parsing import DependencyParsingCriterion
from amos_fairseq.data.tagging import NO_LABEL

RELATIONS = ["det", "nsubj", "nsubj:pass", "root"]


def test_loss_and_scores_by_hand():
    """Two words and a padded slot, a third word that is cut. The first is right but for its subtype, the second is wrong."""
    scores = torch.zeros(1, 3, 4, 4)
    scores[0, 0, 2, 2] = 3.0  # the first word: head 2, nsubj:pass
    scores[0, 1, 1, 3] = 2.0  # the second: head 1, root
    target = torch.tensor([[2 * 4 + 1, 0 * 4 + 3, NO_LABEL]])
    model = type("Model", (), {"training": False, "__call__": lambda self, **_: scores})()
    criterion = DependencyParsingCriterion(SimpleNamespace(labels=RELATIONS))
    sample = {"net_input": {}, "target": target, "nwords": 2, "all_words": 3, "ntokens": 5, "nsentences": 1}
    loss, size, log = criterion(model, sample)
    expected = math.log(15 + math.exp(3)) + math.log(15 + math.exp(2))
    assert (loss.item(), size) == (pytest.approx(expected, rel=1e-6), 2)
    with metrics.aggregate(new_root=True) as aggregated:
        log = {name: v.item() if torch.is_tensor(v) else v for name, v in log.items()}
        criterion.reduce_metrics([log, log])
    values = aggregated.get_smoothed_values()
    assert (values["uas"], values["las"]) == (33.33, 33.33)
    assert values["loss"] == pytest.approx(expected / 2, abs=1e-4)
    model.training = True
    assert "_words" not in criterion(model, sample)[2]
