"""Settings of the main network that keep a detector alive: the bias of its head, and a masked-token loss beside detection."""

from typing import Any

import pytest
import torch
from sklearn.decomposition import PCA
from small_models import (
    AMOS_SETTINGS,
    ELECTRA_SETTINGS,
    TEAMS_SETTINGS,
    amos_criterion,
    electra_criterion,
    logged,
    small_amos,
    small_batch,
    small_electra,
    small_task,
)
from torch.nn.functional import cross_entropy

from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.models.teams import TeamsConfig, TeamsModel
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

DETECTORS = {
    "amos": (AmosModel, AmosConfig, AMOS_SETTINGS),
    "electra": (ElectraModel, ElectraConfig, ELECTRA_SETTINGS),
    "teams": (TeamsModel, TeamsConfig, TEAMS_SETTINGS),
}
SMALL = {"amos": (small_amos, amos_criterion), "electra": (small_electra, electra_criterion)}


def build(name: str, **settings: Any) -> torch.nn.Module:
    model_class, config_class, common = DETECTORS[name]
    torch.manual_seed(0)
    return model_class.build_model(config_class(**(common | settings)), small_task())


SLOWER = {
    "amos": ("discriminator.layers.", "discriminator.relative_position.", "detection_head."),
    "electra": ("discriminator.layers.", "detection_head."),
    # The generator's two layers share one with the discriminator, and its relative positions.
    "teams": (*(f"discriminator.layers.{number}." for number in (1, 2, 3)), "detection_head.", "rtd_layer."),
}


@pytest.mark.parametrize("name", DETECTORS)
def test_only_what_the_discriminator_alone_uses_has_a_lower_rate(name: str) -> None:
    positions = {} if name == "electra" else {"relative_position_scheme": "t5"}
    model = build(name, discriminator_lr_scale=0.25, **positions)
    optimizer = GroupedAdam(GroupedAdamConfig(lr=[0.02], weight_decay=0.01), list(model.parameters()))
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    slower = {key for key, parameter in model.named_parameters() if rates[id(parameter)] == pytest.approx(0.005)}
    assert slower == {key for key, _ in model.named_parameters() if key.startswith(SLOWER[name])}
    assert {rates[id(parameter)] for key, parameter in model.named_parameters() if key not in slower} == {0.02}
    assert optimizer.get_lr() == 0.02
    optimizer.set_lr(0.04)
    assert {group["lr"] for group in optimizer.param_groups} == {0.04, 0.01}


@pytest.mark.parametrize("lengths", [(12, 12), (12, 7, 12)])
@pytest.mark.parametrize("name", SMALL)
def test_masked_token_loss_of_the_main_network(name: str, lengths: tuple[int, ...]) -> None:
    """The loss grows by the weight times the cross-entropy at masked positions, from states and embeddings step by step."""
    make, criterion = SMALL[name]
    model, batch = make(encoder_mlm_weight=0.5).eval(), small_batch(lengths)
    inputs = batch["net_input"]
    torch.manual_seed(3)
    output = model(PretrainingBatch(**inputs))
    states, head = model.extract_features(output.corrupted_tokens), model.token_prediction.mlm_head
    expected, correct = 0.0, 0
    for row, slot in inputs["masked_weights"].nonzero().tolist():
        position = inputs["masked_positions"][row, slot]
        logits = model.embed_tokens.weight @ head(states[row, position]) + head.bias
        original = inputs["tokens"][row, position]
        expected += cross_entropy(logits, original).item()
        correct += int(logits.argmax() == original)
    losses = {}
    for weight in (0.5, 2.0):
        torch.manual_seed(3)
        losses[weight], _, log = criterion(encoder_mlm_weight=weight)(model, batch)
        assert log["main_loss"].item() == pytest.approx(expected, rel=1e-4)
        assert (log["main_acc"], log["_predicted"]) == (correct, batch["num_masked"])
    # float32 sums of losses of about 1,000.
    assert (losses[2.0] - losses[0.5]).item() == pytest.approx(1.5 * expected, rel=1e-4)


def validated(model: torch.nn.Module, criterion: torch.nn.Module, *batches: dict) -> dict[str, float]:
    model.eval()
    criterion.eval()
    with torch.no_grad():
        return logged(type(criterion), *(criterion(model, batch)[2] for batch in batches))


def test_validation_logs_the_spread_of_the_states_below_the_head() -> None:
    """Against scikit-learn, over two batches with padding."""
    model, batches = small_electra(), [small_batch((12, 7), seed=1), small_batch((12, 12, 5), seed=2)]
    seen = []
    model.detection_head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
    got = validated(model, electra_criterion(), *batches)
    real = [states[batch["net_input"]["tokens"].ne(1)] for states, batch in zip(seen, batches, strict=True)]
    states = torch.cat(real).double().numpy()
    shares = PCA().fit(states).explained_variance_ratio_
    assert got["rtd_first_component"] == pytest.approx(shares[0], rel=1e-3)
    assert got["rtd_participation_ratio"] == pytest.approx(1 / (shares**2).sum(), rel=1e-3)
    assert got["rtd_state_variance"] == pytest.approx(states.var(0).sum() / (states**2).sum(1).mean(), rel=1e-3)
