"""Electric against loops in float64: loss, gradients, logged values, scores."""

import math

import pytest
import torch
from reference_models import naive_cloze, naive_energies, naive_noise_probs
from sklearn.metrics import roc_auc_score
from small_models import (
    ELECTRIC_VARIANTS,
    MASK_PROB,
    MASKED_SHARE,
    batch_of,
    electric_criterion,
    logged,
    set_samples,
    small_batch,
    small_electric,
)

from amos_fairseq.criterions.electric import ElectricCriterion
from amos_fairseq.functional.replaced_token_detection import energies_of, noise_logits
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.pretraining import PretrainingBatch

SPECIAL = (0, 1, 2, 3, 44)  # <s> <pad> </s> <unk> <mask>
LENGTHS = {"full": (12, 12), "padded": (12, 7, 2)}


def batch_with_specials(lengths: tuple[int, ...]) -> dict:
    """An end of line and an unknown token at positions where nothing was sampled."""
    batch = small_batch(lengths)
    inputs = batch["net_input"]
    for row, special in ((0, 2), (1, 3)):
        sampled = inputs["masked_positions"][row].tolist()
        place = next(t for t in range(1, lengths[row]) if t not in sampled)
        inputs["tokens"][row, place] = special
    return batch


def with_given_samples(model: ElectricModel, batch: dict) -> torch.Tensor:
    """Give the model replacements [B,M] instead of samples; the first of each text is the original itself."""
    inputs = batch["net_input"]
    generator = torch.Generator().manual_seed(5)
    sampled = torch.randint(4, 44, inputs["masked_positions"].shape, generator=generator)
    sampled[:, 0] = inputs["tokens"].gather(1, inputs["masked_positions"])[:, 0]
    set_samples(model, sampled)
    return sampled


def reference(model: ElectricModel, batch: dict, sampled: torch.Tensor, discriminator_loss_weight: float) -> float:
    """The summed loss of a batch, text by text without any padding, D from its definition as a quotient."""
    inputs, variant, p = batch["net_input"], model.variant, MASK_PROB
    predicted, detected = 0.0, 0.0
    for row, padded in enumerate(inputs["tokens"]):
        text = padded[padded.ne(1)]
        slots = inputs["masked_weights"][row].nonzero().flatten().tolist()
        noise = {inputs["masked_positions"][row, slot].item(): sampled[row, slot].item() for slot in slots}
        cloze = naive_cloze(model, text)
        ordinary = [t for t, token in enumerate(text.tolist()) if token not in SPECIAL]
        everywhere = model.cfg.generator_loss_tokens == "all"
        for t in ordinary if everywhere else noise:
            predicted -= cloze[t].log_softmax(-1)[text[t]].item() * (MASKED_SHARE if everywhere else 1.0)
        if variant == "two_tower":
            continue
        noised = torch.tensor([noise.get(t, token) for t, token in enumerate(text.tolist())])
        energies, q = naive_energies(model, noised), naive_noise_probs(model, cloze)
        for t in ordinary:
            energy, q_t = energies[t].item(), q[t, noised[t]].item()
            plain = 1 / (1 + math.exp(-energy))
            is_noise = p * q_t / (p * q_t + (1 - p) * math.exp(-energy)) if variant == "electric" else plain
            labelled = noised[t] != text[t] if variant == "electra_labels" else t in noise
            detected -= math.log(is_noise if labelled else 1 - is_noise)
    return predicted + discriminator_loss_weight * MASKED_SHARE * detected


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("variant", "tokens"),
    [
        ("electric", "all"),
        ("two_tower", "all"),
        *((name, "sampled") for name in ELECTRIC_VARIANTS if name != "two_tower"),
    ],
)
def test_loss_against_loops_in_float64(variant: str, tokens: str, lengths: tuple[int, ...]) -> None:
    """Four layers in float32 on one side, large initial values: five digits agree."""
    model = small_electric(variant, generator_loss_tokens=tokens, relative_position_scheme="t5")
    batch = batch_with_specials(lengths)
    sampled = with_given_samples(model, batch)
    loss, sample_size, _ = electric_criterion(model)(model, batch)
    assert loss.item() == pytest.approx(reference(model, batch, sampled, 50.0), rel=1e-5)
    assert (sample_size, type(sample_size)) == (batch["num_masked"], int)


def test_a_sample_that_is_the_original_is_noise() -> None:
    model, batch = small_electric(), batch_with_specials((12, 7))
    with_given_samples(model, batch)
    output = model(PretrainingBatch(**batch["net_input"]))
    for row, place in enumerate(batch["net_input"]["masked_positions"][:, 0].tolist()):
        assert output.is_noise[row, place]
        assert not output.replaced[row, place]
    assert output.is_noise.sum() == batch["num_masked"]
    assert not output.is_noise[:, 0].any()  # where padded slots point to


@pytest.mark.parametrize("variant", ["electric", "electra_tt", "electra_labels"])
def test_the_classifier_trains_the_discriminator_alone(variant: str) -> None:
    """q enters the logits of NCE without a gradient, and no gradient passes through a sample."""
    model, batch = small_electric(variant), small_batch()
    model(PretrainingBatch(**batch["net_input"])).rtd_logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Shared parameters have another name.
    own = [name for name in gradients if name.startswith(("generator.", "mlm_head."))]
    assert len(own) > 40
    assert all(gradients[name] is None for name in own)
    assert all(gradients[name] is not None for name in gradients if name.startswith("discriminator.layers"))


@pytest.mark.parametrize("tokens", ["sampled", "all"])
def test_logged_values_by_hand(tokens: str) -> None:
    """Means over the tokens of each term: no special token, and only sampled positions."""
    model, batch = small_electric(generator_loss_tokens=tokens), batch_with_specials((12, 7, 2))
    sampled = with_given_samples(model, batch)
    got = logged(ElectricCriterion, electric_criterion(model)(model, batch)[2])
    output, inputs = model(PretrainingBatch(**batch["net_input"])), batch["net_input"]
    ordinary = ~torch.isin(inputs["tokens"], torch.tensor(SPECIAL))
    predicted = ordinary if tokens == "all" else inputs["masked_weights"] > 0
    assert got["mlm_loss_2"] == pytest.approx(output.mlm_nll[predicted].mean().item(), abs=1e-4)
    assert got["mlm_acc_2"] == pytest.approx(output.mlm_correct[predicted].float().mean().item(), abs=1e-4)
    logits, labels = output.rtd_logits[ordinary].detach(), output.is_noise[ordinary]
    chosen = torch.sigmoid(torch.where(labels, logits, -logits).double())
    assert got["rtd_loss"] == pytest.approx(-chosen.log().mean().item(), abs=1e-4)
    assert got["rtd_acc"] == pytest.approx((chosen > 0.5).double().mean().item(), abs=1e-4)
    assert got["rtd_auc"] == pytest.approx(roc_auc_score(labels, logits), abs=0.01)
    kept = inputs["tokens"].gather(1, inputs["masked_positions"])
    changed = (sampled.ne(kept) & (inputs["masked_weights"] > 0)).sum().item()
    assert got["replaced"] == pytest.approx(changed / batch["num_masked"], abs=1e-4)
    assert 0 < got["replaced"] < 1


@pytest.mark.parametrize("tokens", ["sampled", "all"])
def test_sums_over_batches_are_the_sum_of_the_whole(tokens: str) -> None:
    """Gradient accumulation and ranks require this."""
    model, whole = small_electric(generator_loss_tokens=tokens), small_batch((12, 7, 12, 10))
    sampled = with_given_samples(model, whole)
    criterion = electric_criterion(model)
    loss, sample_size, log = criterion(model, whole)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        inputs = {name: value[rows] for name, value in whole["net_input"].items()}
        set_samples(model, sampled[rows])
        parts.append(criterion(model, batch_of(inputs)))
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-5)
    assert sum(part[1] for part in parts) == sample_size
    one, several = logged(ElectricCriterion, log), logged(ElectricCriterion, *(part[2] for part in parts))
    assert one.pop("rtd_logit_std") != several.pop("rtd_logit_std")  # around the mean of a batch
    assert several == pytest.approx(one, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("share", [0.15, 0.25, 0.5])
def test_noise_logit_is_that_of_the_quotient(share: float) -> None:
    """D = p q / (p q + (1 - p) exp(-E)), and back."""
    energies, log_q = torch.tensor([-2.0, 0.0, 3.5]), torch.tensor([-4.0, -0.5, -7.0])
    logits = noise_logits(energies, log_q, share)
    for energy, log_q_t, logit in zip(energies.tolist(), log_q.tolist(), logits.tolist(), strict=True):
        noise, text = share * math.exp(log_q_t), (1 - share) * math.exp(-energy)
        assert 1 / (1 + math.exp(-logit)) == pytest.approx(noise / (noise + text), rel=1e-5)
    assert torch.allclose(energies_of(logits, log_q, share), energies, atol=1e-5)


@pytest.mark.parametrize("variant", ELECTRIC_VARIANTS)
def test_scores_of_tokens_by_their_formulas(variant: str) -> None:
    """-E; log(p q (1 - D) / ((1 - p) D)) with D of noise; P of D = p q (1 - P) / (p q + (1 - p) P), the share of replaced
    tokens among all that equal x; log q. 0 at special tokens and padding."""
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
            elif variant == "electra_labels":
                odds, sampled = math.exp(energies[t]), MASK_PROB * q[t, token].item()
                expected = math.log(sampled / (odds * (1 - MASK_PROB + sampled) + sampled))
            assert got[row, t].item() == pytest.approx(expected, abs=1e-4)
    assert got[1, 7:].eq(0).all()
