"""ELECTRA's criterion: each variant's loss from given outputs in float64, with and without padding."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import (
    ELECTRA_VARIANTS,
    MASKED_SHARE,
    electra_criterion,
    logged,
    masked_slots,
    random_replaced,
    small_batch,
    small_electra,
)

from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import random_positions
from amos_fairseq.models.electra import ElectraOutput
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules.heads import TokenPredictions

PADDED = (12, 7, 12, 10)
FULL = (12, 12, 12)
RTD = {"rtd_loss", "rtd_acc", "rtd_auc", "rtd_recall", "rtd_precision", "rtd_loss_above_prior", "rtd_logit_std"}
MLM = {"mlm_loss_2", "mlm_acc_2"}


class GivenOutput(torch.nn.Module):
    """A model with a given output; the test sets the fields of the variant."""

    depth_names = ["2"]

    def __init__(self, batch: dict, seed: int = 0, **fields):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        inputs = batch["net_input"]
        (B, T), M = inputs["tokens"].shape, inputs["masked_positions"].size(1)
        replaced = random_replaced(batch, generator)
        output = ElectraOutput(
            mlm_nll=torch.rand(B, M, generator=generator) * 8,
            mlm_correct=torch.rand(B, M, generator=generator) < 0.4,
            sampled_tokens=torch.zeros(B, M, dtype=torch.int64),
            corrupted_tokens=torch.zeros(B, T, dtype=torch.int64),
            replaced=replaced,
            rtd_logits=torch.randn(B, T, generator=generator) * 2,
        )
        self.output = replace(output, **fields)

    def forward(self, batch: PretrainingBatch) -> ElectraOutput:
        return self.output


def detection(output: ElectraOutput, row: int, position: int) -> float:
    original = 1 / (1 + math.exp(output.rtd_logits[row, position].item()))
    return -math.log(1 - original if output.replaced[row, position] else original)


def all_detection(batch: dict, output: ElectraOutput) -> float:
    return sum(detection(output, *place) for place in batch["net_input"]["tokens"].ne(1).nonzero().tolist())


@pytest.mark.parametrize("lengths", [PADDED, FULL])
def test_a_generator_without_mlm_loss_adds_nothing(lengths: tuple[int, ...]) -> None:
    """The loss is lambda r sum of detection; a frozen generator's predictions are logged all the same."""
    batch = small_batch(lengths)
    frozen = GivenOutput(batch, learns_by_likelihood=False)
    blind = GivenOutput(batch, mlm_nll=None, mlm_correct=None, learns_by_likelihood=False)
    expected = 50 * MASKED_SHARE * all_detection(batch, frozen.output)
    logs = []
    for model in (frozen, blind):
        loss, sample_size, log = electra_criterion()(model, batch)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert sample_size == len(masked_slots(batch))
        logs.append(logged(ElectraCriterion, log))
    nlls = [frozen.output.mlm_nll[row, slot].item() for row, slot, _ in masked_slots(batch)]
    assert logs[0]["mlm_loss_2"] == pytest.approx(sum(nlls) / len(nlls), abs=1e-4)
    assert set(logs[0]) == {"loss", "replaced"} | RTD | MLM
    assert set(logs[1]) == {"loss", "replaced"} | RTD


@pytest.mark.parametrize("lengths", [PADDED, FULL])
def test_reward_instead_of_likelihood_by_hand(lengths: tuple[int, ...]) -> None:
    batch, generator = small_batch(lengths), torch.Generator().manual_seed(1)
    shape = batch["net_input"]["masked_positions"].shape
    log_probs, baseline = -torch.rand(shape, generator=generator) * 4, torch.randn(shape, generator=generator)
    given = {"sampled_log_probs": log_probs, "baseline_logits": baseline, "learns_by_likelihood": False}
    model = GivenOutput(batch, **given)
    loss, _, log = electra_criterion()(model, batch)
    policy = base = reward = 0.0
    for row, slot, position in masked_slots(batch):
        r, predicted = detection(model.output, row, position), 1 / (1 + math.exp(-baseline[row, slot].item()))
        policy -= (r + math.log(predicted)) * log_probs[row, slot].item()
        base -= math.exp(-r) * math.log(predicted) + (1 - math.exp(-r)) * math.log(1 - predicted)
        reward += r
    detected = 50 * MASKED_SHARE * all_detection(batch, model.output)
    assert loss.item() == pytest.approx(policy + base + detected, rel=1e-5)
    got, count = logged(ElectraCriterion, log), len(masked_slots(batch))
    assert got["policy_loss"] == pytest.approx(policy / count, abs=1e-4)
    assert got["baseline_loss"] == pytest.approx(base / count, abs=1e-4)
    assert got["reward"] == pytest.approx(reward / count, abs=1e-4)
    assert set(got) == {"loss", "replaced", "policy_loss", "baseline_loss", "reward"} | RTD | MLM


@pytest.mark.parametrize("lengths", [PADDED, FULL])
def test_the_detection_loss_of_masked_positions_is_their_mean(lengths: tuple[int, ...]) -> None:
    batch = small_batch(lengths)
    model = GivenOutput(batch)
    loss, sample_size, log = electra_criterion(detection_positions="masked")(model, batch)
    losses = [detection(model.output, row, position) for row, _, position in masked_slots(batch)]
    mlm = sum(model.output.mlm_nll[row, slot].item() for row, slot, _ in masked_slots(batch))
    assert loss.item() == pytest.approx(mlm + 50 * sum(losses), rel=1e-6)
    got = logged(ElectraCriterion, log)
    assert got["rtd_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    is_right = model.output.replaced == (model.output.rtd_logits > 0)
    right = [is_right[row, position].item() for row, _, position in masked_slots(batch)]
    assert got["rtd_acc"] == pytest.approx(sum(right) / len(right), abs=1e-4)
    assert got["replaced"] == pytest.approx(model.output.replaced.sum().item() / sample_size, abs=1e-4)


def test_expected_loss_of_random_positions_is_the_mean_over_all() -> None:
    """Over 1,000 samples, within 4 standard errors of their mean."""
    batch = small_batch(PADDED)
    model, criterion = GivenOutput(batch), electra_criterion(1.0, detection_positions="random")
    torch.manual_seed(0)
    mlm = sum(model.output.mlm_nll[row, slot].item() for row, slot, _ in masked_slots(batch))
    losses, log = [], {}
    for _ in range(1_000):
        loss, sample_size, log = criterion(model, batch)
        assert log["_logits"].sum().item() == sample_size
        losses.append(loss.item() - mlm)
    expected = 0.0
    for row, length in enumerate(PADDED):
        count = int(batch["net_input"]["masked_weights"][row].sum())
        expected += count / length * sum(detection(model.output, row, position) for position in range(length))
    seen = torch.tensor(losses, dtype=torch.float64)
    assert abs(seen.mean().item() - expected) < 4 * seen.std().item() / math.sqrt(len(losses))
    assert seen.std() > 0.1
    # How many are replaced does not depend on the scored positions.
    assert logged(ElectraCriterion, log)["replaced"] == pytest.approx(model.output.replaced.sum().item() / 11, abs=1e-4)


def test_candidates_are_sampled_uniformly() -> None:
    candidates = torch.tensor([[True] * 5 + [False], [True, False] * 3]).repeat(4_000, 1)
    torch.manual_seed(0)
    sampled = random_positions(candidates, torch.tensor([2, 3]).repeat(4_000))
    assert sampled.sum(1).view(-1, 2).eq(torch.tensor([2, 3])).all()
    first, second = sampled[::2].double().mean(0), sampled[1::2].double().mean(0)
    assert second.equal(candidates[1].double())
    assert first[5] == 0
    assert first[:5].sub(2 / 5).abs().max() < 4.5 * math.sqrt(0.4 * 0.6 / 4_000)


@pytest.mark.parametrize("lengths", [PADDED, FULL])
@pytest.mark.parametrize("over_all_tokens", [False, True])
def test_predictions_instead_of_detection_by_hand(lengths: tuple[int, ...], over_all_tokens: bool) -> None:
    """Over masked positions with the weight that MLM has; over all tokens that are not special times r."""
    batch, generator = small_batch(lengths), torch.Generator().manual_seed(2)
    tokens = batch["net_input"]["tokens"]
    weights = tokens.ge(4).float() if over_all_tokens else batch["net_input"]["masked_weights"]
    nll, correct, copies = torch.rand(3, *weights.shape, generator=generator)
    nll, correct, copies = nll * 5, correct < 0.5, copies if over_all_tokens else None
    model = GivenOutput(batch, rtd_logits=None, predictions=TokenPredictions(nll, correct, weights, copies))
    loss, sample_size, log = electra_criterion(main_loss_weight=3.0)(model, batch)
    mlm = sum(model.output.mlm_nll[row, slot].item() for row, slot, _ in masked_slots(batch))
    counted = [tuple(place) for place in weights.nonzero().tolist()]
    main = sum(nll[place].item() for place in counted)
    assert loss.item() == pytest.approx(mlm + 3 * (MASKED_SHARE if over_all_tokens else 1) * main, rel=1e-6)
    got = logged(ElectraCriterion, log)
    assert got["main_loss"] == pytest.approx(main / len(counted), abs=1e-4)
    assert got["main_acc"] == pytest.approx(sum(correct[place].item() for place in counted) / len(counted), abs=1e-4)
    assert got["replaced"] == pytest.approx(model.output.replaced.sum().item() / sample_size, abs=1e-4)
    copied = {"copy_prob"} if over_all_tokens else set()
    assert set(got) == {"loss", "replaced", "main_loss", "main_acc"} | MLM | copied
    if over_all_tokens:
        assert got["copy_prob"] == pytest.approx(sum(copies[p].item() for p in counted) / len(counted), abs=1e-4)


@pytest.mark.parametrize("variant", ["replace_mlm", "all_tokens_mlm"])
def test_main_network_predicts_the_original_tokens(variant: str) -> None:
    """From the encoder's states, head and embeddings step by step in float64; padding and special tokens never count."""
    model, batch = small_electra(**ELECTRA_VARIANTS[variant]).double(), small_batch()
    tokens = batch["net_input"]["tokens"]
    output = model(
        PretrainingBatch(**batch["net_input"] | {"masked_weights": batch["net_input"]["masked_weights"].double()})
    )
    states = model.extract_features(output.corrupted_tokens)
    head, expected, seen = model.token_prediction, [], []
    for row, column in output.predictions.weights.nonzero().tolist():
        t = column if variant == "all_tokens_mlm" else batch["net_input"]["masked_positions"][row, column]
        hidden = head.mlm_head(states[row, t])
        p = (model.embed_tokens.weight @ hidden + head.mlm_head.bias).softmax(-1)
        if head.copy_layer is not None:
            d = head.copy_layer(states[row, t]).sigmoid()
            p = (1 - d) * p + d * torch.nn.functional.one_hot(output.corrupted_tokens[row, t], len(p))
        expected.append(-p[tokens[row, t]].log().item())
        seen.append(output.predictions.nll[row, column].item())
    # The logits are float32, as everywhere.
    assert seen == pytest.approx(expected, rel=1e-4)
    assert len(seen) == (tokens.ge(4).sum() if variant == "all_tokens_mlm" else batch["num_masked"])


def test_detection_positions_require_detection() -> None:
    with pytest.raises(UserError, match="--detection-positions masked needs --main-objective"):
        electra_criterion(detection_positions="masked")(small_electra(main_objective="replace_mlm"), small_batch())


@pytest.mark.parametrize("variant", ELECTRA_VARIANTS)
def test_sums_and_keys_are_the_same_for_every_batch(variant: str) -> None:
    """Ranks and accumulated batches require this; the loss in eval mode is finite, as validation needs."""
    model, criterion = small_electra(**ELECTRA_VARIANTS[variant]).eval(), electra_criterion()
    with torch.no_grad():
        logs = [criterion(model, small_batch(lengths, seed))[2] for seed, lengths in enumerate([PADDED, (12,), (5, 5)])]
    kinds = [{key: type(value) for key, value in log.items()} for log in logs]
    assert kinds[0] == kinds[1] == kinds[2]
    assert all(math.isfinite(value) for key, value in logged(ElectraCriterion, *logs).items() if key != "rtd_auc")
