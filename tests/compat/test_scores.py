"""Validation scores of a run: numpy scalars and nan."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amos_fairseq.compat.scores import comparable, return_comparable_scores

NAN = np.float64("nan")


def validated(scores, maximize=True):
    settings = SimpleNamespace(maximize_best_checkpoint_metric=maximize, best_checkpoint_metric="score")
    cfg = SimpleNamespace(checkpoint=settings)
    return return_comparable_scores(lambda cfg, trainer: list(scores), cfg, "trainer")


def test_a_numpy_scalar_becomes_a_python_number(tmp_path):
    torch.save({"best": np.float64(0.5)}, tmp_path / "numpy.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "numpy.pt", weights_only=True)
    torch.save({"best": validated([np.float64(0.5), None])}, tmp_path / "python.pt")
    assert torch.load(tmp_path / "python.pt", weights_only=True) == {"best": [0.5, None]}


@pytest.mark.parametrize(("maximize", "worst"), [(True, -math.inf), (False, math.inf)])
def test_nan_is_worse_than_any_number(maximize, worst):
    assert comparable(NAN, maximize) == worst
    assert comparable(1.5, maximize) == 1.5


def test_the_best_of_several_epochs_survives_one_without_a_score():
    """fairseq keeps max(new, best so far), in this order: a nan in between would make it forget."""

    def best_by_fairseqs_rule(scores):
        best = scores[0]
        for score in scores:
            best = max(score, best)
        return best

    seen = [0.3, NAN, 0.2]
    assert best_by_fairseqs_rule([float(score) for score in seen]) == 0.2
    assert best_by_fairseqs_rule(validated(seen)) == 0.3
