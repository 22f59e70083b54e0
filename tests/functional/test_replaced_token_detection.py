"""Detection metrics against scikit-learn, noise-contrastive estimation and REINFORCE against the thesis's formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from scipy.stats import entropy, norm
from sklearn.metrics import accuracy_score, log_loss, precision_score, recall_score, roc_auc_score
from small_models import batch_of, electra_criterion, electric_criterion, small_dictionary, small_electra
from torch import Tensor

from amos_fairseq.criterions.pretraining import detection_losses, detection_sums, log_detection
from amos_fairseq.functional.replaced_token_detection import (
    auc_from_histograms,
    baseline_losses,
    logit_histograms,
    policy_losses,
    state_spread,
    state_sums,
)
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.pretraining import PretrainingBatch


def auc(logits: torch.Tensor, replaced: torch.Tensor) -> float:
    original, positive = logit_histograms(logits, replaced.long(), 2, torch.ones_like(replaced))
    return auc_from_histograms(positive, original)


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
    for one_class in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
        assert math.isnan(auc(perfect, one_class))


def test_logged_rates_match_scikit_learn_over_all_batches():
    """Three batches with padding, summed as the criterion sums logging outputs."""
    generator = torch.Generator().manual_seed(2)
    all_logits, all_replaced, deviations, totals, num_masked = [], [], [], {}, 0
    for batch in range(3):
        is_real = torch.rand(4, 50, generator=generator) < 0.8
        replaced = (torch.rand(4, 50, generator=generator) < 0.3) & is_real
        logits = torch.randn(4, 50, generator=generator) * (batch + 1) + replaced
        logits[~is_real] = 20.0 * (-1) ** batch  # any value at padding
        rtd_loss = (detection_losses(logits, replaced) * is_real).sum()
        sums = detection_sums(logits, replaced, is_real) | {"rtd_loss": rtd_loss}
        totals = {key: totals.get(key, 0) + value for key, value in sums.items()}
        all_logits.append(logits[is_real])
        all_replaced.append(replaced[is_real])
        num_masked += 70
        deviations.append((logits[is_real] - logits[is_real].mean()).numpy())
    logits, replaced = torch.cat(all_logits), torch.cat(all_replaced)
    with metrics.aggregate(new_root=True) as aggregated:
        log_detection(totals, num_masked)
    got = aggregated.get_smoothed_values()
    assert got["replaced"] == pytest.approx(int(replaced.sum()) / num_masked, abs=1e-4)
    assert got["rtd_acc"] == pytest.approx(accuracy_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_recall"] == pytest.approx(recall_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_precision"] == pytest.approx(precision_score(replaced, logits > 0), abs=1e-4)
    assert got["rtd_auc"] == pytest.approx(roc_auc_score(replaced, logits), abs=0.01)
    # Around the mean of each batch; the three means differ by up to 0.5 here.
    assert got["rtd_logit_std"] == pytest.approx(np.concatenate(deviations).std(), rel=1e-3)
    loss = log_loss(replaced, logits.sigmoid().double(), labels=[False, True])
    assert got["rtd_loss"] == pytest.approx(loss, abs=1e-4)
    assert got["rtd_loss_above_prior"] == pytest.approx(loss - entropy(np.bincount(replaced)), abs=2e-4)


def test_rates_without_a_denominator():
    replaced = torch.zeros(2, 5, dtype=torch.bool)
    logits = torch.full((2, 5), -1.0)
    totals = detection_sums(logits, replaced, ~replaced) | {"rtd_loss": detection_losses(logits, replaced).sum()}
    with metrics.aggregate(new_root=True) as aggregated:
        log_detection(totals, 3)
    got = aggregated.get_smoothed_values()
    assert math.isnan(got.pop("rtd_auc"))
    loss = round(math.log1p(math.exp(-1)), 4)  # -log(1 - sigmoid(-1)); the entropy of the labels is 0
    expected = dict.fromkeys(["replaced", "rtd_recall", "rtd_precision", "rtd_logit_std"], 0.0)
    assert got == expected | {"rtd_loss": loss, "rtd_acc": 1.0, "rtd_loss_above_prior": loss}


def test_spread_of_equal_states():
    """Rounding must not look like a variance: bfloat16 states with a square of 512 each."""
    states = torch.full((8, 64, 512), 1.0, dtype=torch.bfloat16) * torch.linspace(-1.7, 1.7, 512).bfloat16()
    spread = state_spread(512, *state_sums(states, torch.ones(8, 64, dtype=torch.bool)))
    assert spread.variance == 0
    assert math.isnan(spread.first_component)
    assert math.isnan(spread.participation_ratio)
    # Sums of 4,995 float32 states are rounded: of two seeds in three the trace of their covariance is above 0.
    for seed in range(8):
        equal = torch.randn(512, generator=torch.Generator().manual_seed(seed)).expand(5, 999, 512)
        assert state_spread(4995, *state_sums(equal, torch.ones(5, 999, dtype=torch.bool))).variance == 0
    assert all(math.isnan(value) for value in state_spread(0, torch.zeros(4), torch.zeros(4, 4)))
    # A difference of one part in a thousand is one.
    states[0, 0] *= 1.01
    assert 0 < state_spread(512, *state_sums(states, torch.ones(8, 64, dtype=torch.bool))).variance < 1e-6


VOCABULARY, NOISE_SHARE, TEXTS = 5, 0.3, 256
SIZES = {"encoder_layers": 1, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}
SIZES |= {"max_positions": 3, "dropout": 0.0, "attention_dropout": 0.0, "linear_init_std": 0.1}
SIZES |= {"mask_prob": NOISE_SHARE}


def joint() -> Tensor:
    """P(a, b) of two tokens: [5,5] with conditional probabilities from 0.01 to 0.9."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    return logits.flatten().softmax(0).view(VOCABULARY, VOCABULARY)


def texts(pairs: Tensor) -> Tensor:
    """[N] indices of pairs -> [N,3] tokens ``<s> a b``."""
    return torch.stack([torch.zeros_like(pairs), 4 + pairs // VOCABULARY, 4 + pairs % VOCABULARY], dim=1)


def noisy_batch(generator: torch.Generator) -> dict:
    """The second token is noise with the probability of the model's setting, independently in each text: the terms of NCE."""
    tokens = texts(torch.multinomial(joint().flatten(), TEXTS, replacement=True, generator=generator))
    weights = (torch.rand(TEXTS, 1, generator=generator) < NOISE_SHARE).float()
    masked = {"masked_positions": (2 * weights).long(), "masked_weights": weights}
    return batch_of({"tokens": tokens, "masked_tokens": tokens, **masked})


def trained(updates: int) -> ElectricModel:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    task = SimpleNamespace(source_dictionary=small_dictionary(VOCABULARY), masked_share=NOISE_SHARE)
    model = ElectricModel.build_model(ElectricConfig(**SIZES, generator_size=0.5), task)
    criterion = electric_criterion(model, discriminator_loss_weight=10.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for _ in range(updates):
        loss, sample_size, _ = criterion(model, noisy_batch(generator))
        optimizer.zero_grad()
        (loss / sample_size).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.mark.slow
def test_scores_converge_to_the_known_log_probabilities() -> None:
    """P(b | a) of all pairs: the mean error of log p under P below 0.15 nats, normalisers within 15 % of 1.

    250 updates see 19,000 noise tokens, 770 for a pair: a count has 4 % of sampling error there, and a tail of the
    distribution several times as much.
    """
    model = trained(250)
    scores = model.token_log_probs(texts(torch.arange(VOCABULARY * VOCABULARY)))[:, 2].view(VOCABULARY, VOCABULARY)
    expected = (joint() / joint().sum(1, keepdim=True)).log()
    error = (joint() * (scores - expected).abs()).sum()
    assert error < 0.15
    assert (scores.exp().sum(1) - 1).abs().max() < 0.15


def exact_gradient(logits: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Of -E[R] = -sum_v q(v) R(v): written out, -q(v) (R(v) - E[R])."""
    q = logits.softmax(-1)
    return -q * (rewards - (q * rewards).sum())


@pytest.mark.parametrize("baseline", [-3.0, 0.0, 4.0])
def test_expected_gradient_does_not_depend_on_the_baseline(baseline: float) -> None:
    """sum_v q(v) grad(policy loss of v), no sampling at all: b drops out of the sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    rewards = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) * 3
    losses = policy_losses(logits.log_softmax(-1), rewards, torch.full((VOCABULARY,), baseline, dtype=torch.float64))
    (logits.detach().softmax(-1) * losses).sum().backward()
    torch.testing.assert_close(logits.grad, exact_gradient(logits.detach(), rewards))


def test_rewards_and_baseline_of_the_policy_loss_receive_no_gradient() -> None:
    log_probs, rewards, logits = (torch.rand(3, requires_grad=True) for _ in range(3))
    policy_losses(log_probs, rewards, logits).sum().backward()
    assert rewards.grad is None
    assert logits.grad is None
    baseline_losses(logits, rewards).sum().backward()
    assert rewards.grad is None
    assert logits.grad is not None


def test_gradient_of_the_model_matches_the_enumerated_expectation() -> None:
    """The whole step: 4,000 copies of one text with one masked token, against every token in its place.

    Compared is the gradient of the generator's output bias, within 4 standard errors that follow from the enumeration too;
    some of its parts are more than 8 errors from 0, so neither no gradient nor its reverse would pass.
    """
    copies, position = 4_000, 3
    model = small_electra(num_tokens=VOCABULARY, adversarial=True)
    tokens = torch.tensor([[0, 4, 6, 5, 8, 2]])
    masked = tokens.clone()
    masked[0, position] = 4 + VOCABULARY
    net_input = {"tokens": tokens, "masked_tokens": masked, "masked_positions": torch.tensor([[position]])}
    net_input["masked_weights"] = torch.ones(1, 1)
    criterion = electra_criterion()

    def sample(rows: int) -> dict:
        inputs = {name: value.expand(rows, -1) for name, value in net_input.items()}
        return {"net_input": inputs, "ntokens": rows * 6, "nsentences": rows, "num_masked": rows}

    tokens = torch.arange(4, 4 + VOCABULARY).unsqueeze(1)
    sample_tokens = model.sample
    model.sample = lambda logits: tokens
    with torch.no_grad():
        output = model(PretrainingBatch(**sample(VOCABULARY)["net_input"]))
        rewards = criterion.rewards(output, PretrainingBatch(**sample(VOCABULARY)["net_input"]))[:, 0]
        q = output.sampled_log_probs[:, 0].exp()
        b = -torch.nn.functional.logsigmoid(output.baseline_logits[0, 0])
    assert q.sum().item() == pytest.approx(1)
    assert rewards.max() - rewards.min() > 0.1  # tokens differ, or there would be nothing to learn
    per_token = -(rewards - b).unsqueeze(1) * (torch.eye(VOCABULARY) - q)  # [sampled, bias of]
    expected = q @ per_token
    torch.testing.assert_close(expected, exact_gradient(q.log(), rewards))
    error = ((q @ per_token.square() - expected.square()) / copies).sqrt()

    model.sample = sample_tokens
    torch.manual_seed(1)
    batch = PretrainingBatch(**sample(copies)["net_input"])
    loss, log = criterion.generator_loss(model(batch), batch, "1")
    loss.backward()
    got = model.mlm_head.bias.grad / copies
    assert got[4 : 4 + VOCABULARY].sub(expected).abs().le(4 * error).all()
    assert expected.abs().gt(8 * error).any()
    assert got[:4].eq(0).all()  # special tokens are never sampled: nothing pushes them
    assert got[4 + VOCABULARY :].eq(0).all()
    assert log["reward"].item() / copies == pytest.approx((q @ rewards).item(), abs=4 * rewards.std().item() / 60)
