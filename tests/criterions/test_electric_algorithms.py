"""Algorithm 2, one pass for all tokens and all noise, against Algorithm 1, one pass for each sample (thesis section 5.1.4)."""

import itertools
import math

import pytest
import torch
from reference_models import naive_cloze, naive_energies, naive_noise_probs
from small_models import MASK_PROB, electric_criterion, set_samples, small_batch, small_electric

from amos_fairseq.functional.nce import energies_of, noise_logits
from amos_fairseq.models.electric import ElectricModel

# <s> and six tokens, and the noise of each position, once the original itself.
TEXT = torch.tensor([0, 5, 9, 17, 9, 30, 41])
NOISE = {1: 8, 2: 31, 3: 17, 4: 12, 5: 40, 6: 5}
# p / (1 - p) of the model is k / (n - k) of the text.
NUM_NOISE, MODEL_SHARE = 2, 2 / 6


def one_text(places: tuple[int, ...]) -> dict:
    positions = torch.tensor([places])
    inputs = {
        "tokens": TEXT[None],
        "masked_tokens": TEXT[None],
        "masked_positions": positions,
        "masked_weights": torch.ones(positions.shape),
    }
    return {"ntokens": 7, "nsentences": 1, "num_masked": len(places), "net_input": inputs}


def algorithm_2(model: ElectricModel, places: tuple[int, ...]) -> float:
    """The summed loss of the classifier over all ordinary tokens, noise at ``places``."""
    set_samples(model, torch.tensor([[NOISE[place] for place in places]]))
    return electric_criterion(model)(model, one_text(places))[2]["rtd_loss"].item()


def probability_of_text(model: ElectricModel, text: torch.Tensor) -> list[float]:
    """D of Algorithm 1, the probability of being text: n p / (n p + k q), with q from the original."""
    q = naive_noise_probs(model, naive_cloze(model, TEXT))
    energies, k, n = naive_energies(model, text), NUM_NOISE, 6 - NUM_NOISE
    unnormalised = [math.exp(-energy) for energy in energies.tolist()]
    return [
        n * p / (n * p + k * q[t, token].item()) for t, (p, token) in enumerate(zip(unnormalised, text, strict=True))
    ]


def replaced_at(place: int) -> torch.Tensor:
    text = TEXT.clone()
    text[place] = NOISE[place]
    return text


def without_context(model: ElectricModel) -> ElectricModel:
    """Disable the discriminator's attention: then no token's score depends on another token."""
    with torch.no_grad():
        for layer in model.discriminator.layers:
            layer.attention.output.weight.zero_()
    return model


def mean_of_algorithm_2(model: ElectricModel) -> float:
    """Over all 15 pairs of places."""
    choices = list(itertools.combinations(NOISE, NUM_NOISE))
    return sum(algorithm_2(model, places) for places in choices) / len(choices)


def mean_of_algorithm_1(model: ElectricModel) -> float:
    """Text weighs (n - k) / n and noise k / n, each negative in a pass of its own."""
    positives = sum(-math.log(d) for d in probability_of_text(model, TEXT)[1:])
    negatives = sum(-math.log(1 - probability_of_text(model, replaced_at(place))[place]) for place in NOISE)
    return (1 - MODEL_SHARE) * positives + MODEL_SHARE * negatives


def test_without_context_the_mean_over_all_positions_is_algorithm_1() -> None:
    """The thesis's two conditions hold: noise elsewhere changes nothing in what is said about a token."""
    model = without_context(small_electric(mask_prob=MODEL_SHARE))
    assert mean_of_algorithm_2(model) == pytest.approx(mean_of_algorithm_1(model), rel=1e-5)


def test_with_context_the_algorithms_differ() -> None:
    """By more than ten times of what the test above allows, or it would compare nothing."""
    model = small_electric(mask_prob=MODEL_SHARE)
    assert mean_of_algorithm_2(model) != pytest.approx(mean_of_algorithm_1(model), rel=1e-4)


def test_a_single_sample_is_scored_as_in_algorithm_1() -> None:
    """With context: the negative of Algorithm 1 is the text with one token replaced, which is Algorithm 2 with k = 1."""
    model = small_electric(mask_prob=MODEL_SHARE)
    for place in NOISE:
        set_samples(model, torch.tensor([[NOISE[place]]]))
        logit = model(**one_text((place,))["net_input"]).rtd_logits[0, place]
        expected = 1 - probability_of_text(model, replaced_at(place))[place]
        assert torch.sigmoid(logit).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("share", [0.15, 0.25, 0.5])
def test_noise_logit_is_that_of_the_quotient(share: float) -> None:
    """D = p q / (p q + (1 - p) exp(-E)), and back."""
    energies, log_q = torch.tensor([-2.0, 0.0, 3.5]), torch.tensor([-4.0, -0.5, -7.0])
    logits = noise_logits(energies, log_q, share)
    for energy, log_q_t, logit in zip(energies.tolist(), log_q.tolist(), logits.tolist(), strict=True):
        noise, text = share * math.exp(log_q_t), (1 - share) * math.exp(-energy)
        assert 1 / (1 + math.exp(-logit)) == pytest.approx(noise / (noise + text), rel=1e-5)
    assert torch.allclose(energies_of(logits, log_q, share), energies, atol=1e-5)


@pytest.mark.parametrize("variant", ["electric", "electra_tt", "two_tower"])
def test_scores_of_tokens_by_their_formulas(variant: str) -> None:
    """-E; log(p q (1 - D) / ((1 - p) D)) with D of noise; log q. 0 at special tokens and padding."""
    model, tokens = small_electric(variant), small_batch((12, 7))["net_input"]["tokens"]
    tokens[0, 5] = 3
    got = model.token_log_probs(tokens)
    assert got.dtype == torch.float32
    for row, text in enumerate(tokens):
        text = text[text.ne(1)]
        q = naive_noise_probs(model, naive_cloze(model, text))
        energies = None if variant == "two_tower" else naive_energies(model, text).tolist()
        for t, token in enumerate(text.tolist()):
            if token in (0, 3):
                assert got[row, t] == 0
                continue
            expected = math.log(q[t, token].item())
            if variant == "electric":
                expected = -energies[t]
            elif variant == "electra_tt":
                noise = 1 / (1 + math.exp(-energies[t]))
                expected += math.log(MASK_PROB / (1 - MASK_PROB) * (1 - noise) / noise)
            assert got[row, t].item() == pytest.approx(expected, abs=1e-4)
    assert got[1, 7:].eq(0).all()
