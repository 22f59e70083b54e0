"""The objective of dependency parsing by hand, and its logged scores."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_models import logged

from amos_fairseq.downstream.words.dataset import NO_LABEL
from amos_fairseq.downstream.words.model import TREES, WordOutput
from amos_fairseq.downstream.words.task import DependencyParsingConfig, DependencyParsingCriterion

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


def test_the_term_of_views_by_hand():
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
