"""TEAMS's loss (Eq. 9), every gradient and logged value against a reference in float64."""

import math

import pytest
import torch
from reference_models import ReferenceTeams
from small_models import ONLY_MWS, ONLY_RTD, logged, set_samples, small_batch, small_task, small_teams, teams_criterion

from amos_fairseq.criterions.teams import TeamsCriterion
from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import PretrainingBatch

# Up to seven layers in float32 against float64.
CLOSE = {"rtol": 2e-4, "atol": 5e-5}


def random_samples(batch: dict, num_negatives: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Replacements, of which some equal the original, and candidates, the original first."""
    generator = torch.Generator().manual_seed(seed)
    tokens, positions = (batch["net_input"][name] for name in ("tokens", "masked_positions"))
    originals = tokens.gather(1, positions)
    sampled = torch.randint(4, 44, positions.shape, generator=generator)
    sampled[:, 0] = originals[:, 0]
    candidates = torch.empty(*positions.shape, 1 + num_negatives, dtype=torch.int64)
    for row in range(len(tokens)):
        for slot in range(positions.size(1)):
            others = (4 + torch.randperm(40, generator=generator)).tolist()
            others = [token for token in others if token != int(originals[row, slot])]
            candidates[row, slot] = torch.tensor([int(originals[row, slot]), *others[:num_negatives]])
    return sampled, candidates


@pytest.mark.parametrize("lengths", [(12, 12), (12, 7, 12, 10)], ids=["full", "padded"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"task_heads": "extra_layer", "relative_position_scheme": "t5"},
        {"task_heads": "ffn", "embedding_dim": 8},
        {"share_layers": "all", "relative_position_scheme": "t5", "embedding_dim": 8},
        {"share_layers": "none", "generator_layers": 1, "representation": "rtd"},
        {"rtd_loss_weight": 3.5, "mws_loss_weight": 0.25, "negative_samples": 1},
        ONLY_MWS,
        ONLY_RTD,
    ],
    ids=str,
)
def test_loss_and_every_gradient(settings: dict, lengths: tuple[int, ...]) -> None:
    model, batch = small_teams(**settings), small_batch(lengths)
    sampled, candidates = random_samples(batch, model.cfg.negative_samples)
    assert set(sampled.eq(candidates[..., 0]).flatten().tolist()) == {True, False}, "some are the original"
    set_samples(model, sampled, candidates)
    reference = ReferenceTeams(model)
    loss, sample_size, log = teams_criterion(model, mlm_loss_weight=1.5)(model, batch)
    loss.backward()

    expected = reference.losses(batch, sampled, candidates)
    rtd_weight = model.cfg.rtd_loss_weight * small_task().masked_share
    weights = {"mlm": 1.5, "rtd": rtd_weight, "mws": model.cfg.mws_loss_weight}
    total = sum(weights[name] * expected[name] for name in expected)
    total.backward()
    assert sample_size == batch["num_masked"]
    torch.testing.assert_close(loss.double(), total, **CLOSE)
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, {name: reference.p[name].grad for name in gradients}, **CLOSE)
    torch.testing.assert_close(log[f"mlm_loss_{model.depth_names[0]}"].double(), expected["mlm"], **CLOSE)
    names = {key.partition("_")[0] for key in logged(TeamsCriterion, log)}
    assert names & {"rtd", "mws"} == set(model.tasks)
    for task in ("rtd", "mws"):
        if task in model.tasks:
            torch.testing.assert_close(log[f"{task}_loss"].double(), expected[task], **CLOSE)


def test_logged_values_are_means_over_all_batches() -> None:
    """Two batches of unlike size: selection by masked positions, detection by tokens, accuracy by counting."""
    model, batches = small_teams().eval(), [small_batch(), small_batch((9, 12), seed=5)]
    logs, losses, right, masked, tokens, detection = [], 0.0, 0, 0, 0, 0.0
    for seed, batch in enumerate(batches):
        criterion = teams_criterion(model)
        torch.manual_seed(seed)
        logs.append(criterion(model, batch)[2])
        torch.manual_seed(seed)
        output = model(PretrainingBatch(**batch["net_input"]))
        detection += float(logs[-1]["rtd_loss"])
        for row, slot in batch["net_input"]["masked_weights"].nonzero().tolist():
            scores = output.mws_logits[row, slot].double()
            losses -= float((scores[0].exp() / scores.exp().sum()).log())
            right += all(float(scores[0]) > float(other) for other in scores[1:])
            masked += 1
        tokens += batch["ntokens"]
    got = logged(TeamsCriterion, *logs)
    assert got["mws_loss"] == pytest.approx(losses / masked, abs=1e-4)
    assert got["mws_acc"] == pytest.approx(right / masked, abs=1e-4)
    assert got["rtd_loss"] == pytest.approx(detection / tokens, abs=1e-4)
    assert {"mlm_loss_2", "mlm_acc_2", "rtd_auc", "replaced"} <= got.keys()
    assert all(type(value) in (int, float) for value in got.values())


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_mlm_loss_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(UserError, match="--mlm-loss-weight"):
        teams_criterion(small_teams(), weight)
