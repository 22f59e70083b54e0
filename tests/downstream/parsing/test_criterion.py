"""The objective of dependency parsing by hand, and its logged scores."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_models import logged

from amos_fairseq.downstream.parsing.model import TREES
from amos_fairseq.downstream.parsing.task import DependencyParsingCriterion
from amos_fairseq.downstream.tagging.dataset import NO_LABEL
from amos_fairseq.downstream.tagging.model import WordOutput

RELATIONS = ["det", "nsubj", "nsubj:pass", "root"]


def test_loss_and_scores_by_hand():
    """Three words and a padded slot, a fourth word is cut. The first is right but for its subtype, the second is wrong, the
    third has the right head and a wrong relation."""
    scores = torch.zeros(1, 4, 5, 4)
    scores[0, 2, 1, 0] = 1.0  # the third: head 1, det
    scores[0, 0, 2, 2] = 3.0  # the first word: head 2, nsubj:pass
    scores[0, 1, 1, 3] = 2.0  # the second: head 1, root
    target = torch.tensor([[2 * 4 + 1, 0 * 4 + 3, 1 * 4 + 1, NO_LABEL]])
    model = type("Model", (), {"training": False, "__call__": lambda self, **_: WordOutput({TREES: scores})})()
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
