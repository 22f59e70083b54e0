"""Detection metrics against scikit-learn, on one batch and summed over many."""

import math

import pytest
import torch
from fairseq.logging import metrics
from scipy.stats import norm
from sklearn.metrics import accuracy_score, precision_score, recall_score, roc_auc_score

from amos_fairseq.criterions.detection import detection_sums, log_detection
from amos_fairseq.functional.replaced_token_detection import auc_from_histograms, logit_histogram


def auc(logits: torch.Tensor, replaced: torch.Tensor) -> float:
    return auc_from_histograms(logit_histogram(logits, replaced), logit_histogram(logits, ~replaced))


def calibrated(d_prime: float, share: float = 0.13, size: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a detector that is as sure as it is right: its classes are d' standard deviations apart, logits d' wide."""
    generator = torch.Generator().manual_seed(0)
    replaced = torch.rand(size, generator=generator) < share
    score = torch.randn(size, generator=generator) + d_prime * replaced
    return d_prime * score - d_prime**2 / 2 + math.log(share / (1 - share)), replaced


@pytest.mark.parametrize("d_prime", [0.05, 0.2, 0.5, 1.0, 2.0, 3.5])
def test_area_of_a_calibrated_detector(d_prime):
    """Also near chance, where all logits are in a few bins: these are narrow because the area is near 1/2."""
    logits, replaced = calibrated(d_prime)
    area = auc(logits, replaced)
    assert area == pytest.approx(roc_auc_score(replaced, logits), abs=0.01)
    assert area == pytest.approx(norm.cdf(d_prime / math.sqrt(2)), abs=0.02)


@pytest.mark.parametrize("shift", [-7.0, 0.0, 7.0])
@pytest.mark.parametrize("width", [0.5, 3.0, 10.0])
def test_area_of_random_logits(shift, width):
    """Also far from 0, where bins are wide, and where they differ little."""
    generator = torch.Generator().manual_seed(1)
    replaced = torch.rand(5000, generator=generator) < 0.3
    logits = (torch.randn(5000, generator=generator) + replaced) * width + shift
    assert auc(logits, replaced) == pytest.approx(roc_auc_score(replaced, logits), abs=0.01)


def test_ties_count_one_half():
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    replaced = torch.tensor([True, False, True, False, True, False])
    # 3 x 3 pairs: 4 ties among the zeros, all others won: (5 + 4 / 2) / 9.
    assert auc(logits, replaced) == pytest.approx(7 / 9)
    assert auc(logits, replaced) == pytest.approx(roc_auc_score(replaced, logits))
    assert auc(torch.zeros(6), replaced) == 0.5


def test_perfect_reversed_and_one_sided():
    replaced = torch.tensor([True, False, True, False])
    perfect = torch.tensor([1e4, -1e4, 3.0, -3.0])
    assert auc(perfect, replaced) == 1.0
    assert auc(-perfect, replaced) == 0.0
    for nobody in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        assert math.isnan(auc(perfect, nobody))


def test_bins_are_equal_in_softsign():
    """Bin b holds t in [b / 200 - 1, (b + 1) / 200 - 1) for t = x / (4 + |x|), that is x = 4 t / (1 - |t|)."""
    middles = [(2 * b + 1) / 400 - 1 for b in range(400)]
    logits = torch.tensor([4 * t / (1 - abs(t)) for t in middles])
    assert logit_histogram(logits, torch.ones(400)).tolist() == [1.0] * 400
    ends = torch.tensor([-math.inf, -1e30, 1e30, math.inf])
    assert logit_histogram(ends, torch.ones(4)).nonzero().flatten().tolist() == [0, 399]


def test_histogram_counts_weights():
    logits = torch.tensor([[0.1, 5.0, -3.0], [0.1, -2.0, math.nan]])
    counts = logit_histogram(logits, torch.tensor([[1, 0, 1], [1, 0, 1]]))
    assert (counts.dtype, counts.shape, counts.sum()) == (torch.float64, (400,), 4)
    assert counts[204] == 2  # 200 * (1 + 0.1 / 4.1)
    assert logit_histogram(logits.bfloat16(), torch.ones(2, 3, dtype=torch.bool)).sum() == 6


def test_logged_rates_match_scikit_learn_over_all_batches():
    """Three batches with padding, summed as the criterion sums logging outputs."""
    generator = torch.Generator().manual_seed(2)
    all_logits, all_replaced, totals, num_masked = [], [], {}, 0
    for batch in range(3):
        is_real = torch.rand(4, 50, generator=generator) < 0.8
        replaced = (torch.rand(4, 50, generator=generator) < 0.3) & is_real
        logits = torch.randn(4, 50, generator=generator) * (batch + 1) + replaced
        logits[~is_real] = 20.0 * (-1) ** batch  # any value at padding
        sums = detection_sums(logits, replaced, is_real) | {"ntokens": int(is_real.sum())}
        totals = {key: totals.get(key, 0) + value for key, value in sums.items()}
        all_logits.append(logits[is_real])
        all_replaced.append(replaced[is_real])
        num_masked += 70
    logits, replaced = torch.cat(all_logits), torch.cat(all_replaced)
    with metrics.aggregate(new_root=True) as aggregated:
        log_detection(totals, num_masked)
    got = aggregated.get_smoothed_values()
    assert got["replaced"] == pytest.approx(int(replaced.sum()) / num_masked, abs=1e-4)
    assert got["rtd_acc"] == pytest.approx(accuracy_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_recall"] == pytest.approx(recall_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_precision"] == pytest.approx(precision_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_auc"] == pytest.approx(roc_auc_score(replaced, logits), abs=0.01)


def test_rates_without_a_denominator():
    nobody = torch.zeros(2, 5, dtype=torch.bool)
    totals = detection_sums(torch.full((2, 5), -1.0), nobody, ~nobody) | {"ntokens": 10}
    with metrics.aggregate(new_root=True) as aggregated:
        log_detection(totals, 3)
    got = aggregated.get_smoothed_values()
    assert math.isnan(got.pop("rtd_auc"))
    assert got == {"replaced": 0.0, "rtd_acc": 1.0, "rtd_recall": 0.0, "rtd_precision": 0.0}
