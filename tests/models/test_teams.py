"""TEAMS's candidates, shared layers, selected branch, and settings that are refused."""

import pytest
import torch
from frequencies import assert_shares
from small_models import ONLY_MWS, ONLY_RTD, TEAMS_LAYOUTS, TEAMS_SETTINGS, fine_tuning_task, small_batch, small_teams

from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.models.teams import TeamsConfig, TeamsModel

ORDINARY = torch.arange(4, 44)


def samples_of(model: TeamsModel, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Replacements [count] and candidates [count, 1+K] of one position, the softmax over ordinary tokens, the original."""
    batch = small_batch((12,), slots=3)["net_input"]
    with torch.no_grad():
        logits, _ = model.predict_logits(PretrainingBatch(**batch))
        hidden = model.generate(PretrainingBatch(**batch))[:, :1]
        original = batch["tokens"].gather(1, batch["masked_positions"])[:, :1]
        torch.manual_seed(4)
        _, _, sampled, candidates = model.predict_and_sample(hidden.expand(1, count, -1), original.expand(1, count))
    return sampled[0], candidates[0], logits[0, 0, 0, ORDINARY].double().softmax(-1), int(original)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_candidates_are_the_original_and_different_other_tokens(kernels: str) -> None:
    sampled, candidates, _, original = samples_of(small_teams(kernels=kernels).eval(), 5000)
    assert candidates.shape == (5000, 4)
    assert candidates[:, 0].eq(original).all()
    assert not candidates[:, 1:].eq(original).any()
    assert torch.isin(candidates, ORDINARY).all()
    assert torch.isin(sampled, ORDINARY).all()
    assert candidates.sort(-1).values.diff(dim=-1).gt(0).all()


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_first_negatives_follow_the_generator_without_the_original(kernels: str) -> None:
    """And replacements follow it with the original, independently of the negatives: 20,000 samples, 5 standard errors."""
    count = 20_000
    sampled, candidates, softmax, original = samples_of(small_teams(kernels=kernels).eval(), count)
    others = softmax.clone()
    others[original - 4] = 0
    others /= others.sum()
    # Sampled together, replacement and negative would never, or always, be equal.
    meeting = (softmax * others).sum()
    for seen, expected in (
        (torch.bincount(sampled, minlength=44)[ORDINARY] / count, softmax),
        (torch.bincount(candidates[:, 1], minlength=44)[ORDINARY] / count, others),
        (sampled.eq(candidates[:, 1]).double().mean(), meeting),
    ):
        assert_shares(seen, expected, count)
    assert softmax[original - 4] > 0.01  # leaving it out makes a difference


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_hardest_negatives_are_the_most_likely_other_tokens(kernels: str) -> None:
    model = small_teams(negative_sampling="hardest", negative_samples=39, kernels=kernels).eval()
    _, candidates, softmax, original = samples_of(model, 2)
    ranked = [token for token in (4 + softmax.argsort(descending=True)).tolist() if token != original]
    assert candidates.tolist() == [[original, *ranked]] * 2


def test_as_many_negatives_as_other_tokens() -> None:
    """Also if one other token is so likely that exp of the rest is 0 in float32."""
    model = small_teams(negative_samples=39).eval()
    with torch.no_grad():
        model.mlm_head.bias[[9, 20]] += 500.0
    _, candidates, _, original = samples_of(model, 50)
    others = [token for token in ORDINARY.tolist() if token != original]
    assert candidates[:, 1:].sort(-1).values.tolist() == [others] * 50


@pytest.mark.parametrize(
    ("settings", "depth", "shared"),
    [
        ({"encoder_layers": 12, "share_layers": "half"}, 6, 3),
        ({"encoder_layers": 12, "share_layers": "none"}, 6, 0),
        ({"encoder_layers": 12, "share_layers": "all"}, 6, 6),
        ({"encoder_layers": 12, "generator_layers": 3}, 3, 1),  # of Figure 4; half is rounded down
        ({"encoder_layers": 2, "generator_layers": 2, "share_layers": "all"}, 2, 2),
    ],
    ids=str,
)
def test_shared_layers_are_the_same_layers_from_the_bottom(settings: dict, depth: int, shared: int) -> None:
    model = small_teams(**settings, relative_position_scheme="t5", token_types=2, embedding_dim=8)
    same = [mine is theirs for mine, theirs in zip(model.generator.layers, model.discriminator.layers, strict=False)]
    assert len(model.generator.layers) == depth
    assert same == [True] * shared + [False] * (depth - shared)
    embeddings = ("embed_positions", "embed_token_types", "embedding_norm", "embedding_projection")
    for below in (*embeddings, "relative_position"):
        assert getattr(model.generator, below) is getattr(model.discriminator, below)


@pytest.mark.parametrize("settings", [layout for layout in TEAMS_LAYOUTS if layout != ONLY_RTD], ids=str)
def test_selection_at_masked_positions_matches_the_states_of_all_tokens(settings: dict) -> None:
    """Its last layer computes them alone; against the states of all tokens."""
    model, batch = small_teams(**settings).double().eval(), small_batch()["net_input"]
    output = model(PretrainingBatch(**batch | {"masked_weights": batch["masked_weights"].double()}))
    everywhere, of_detection = model.discriminate(output.corrupted_tokens, batch["tokens"].eq(1))
    at_masked = gather_positions(everywhere, batch["masked_positions"])
    # Logits are float32.
    torch.testing.assert_close(output.mws_logits, model.select(at_masked, output.candidates), rtol=1e-5, atol=1e-5)
    if "rtd" in model.tasks:
        torch.testing.assert_close(output.rtd_logits, model.detection_head(of_detection))


@pytest.mark.parametrize("settings", TEAMS_LAYOUTS, ids=str)
def test_features_and_fine_tuning_take_the_selected_branch(settings: dict) -> None:
    model, tokens = small_teams(**settings).eval(), small_batch()["net_input"]["tokens"]
    branches = model.discriminate(tokens, tokens.eq(1))
    if settings.get("task_heads") == "ffn":  # its heads are left behind
        branches = [model.discriminator(model.embed_tokens(tokens), tokens.eq(1))[-1]] * 2
    kept = branches[str(model.cfg.representation) == "rtd"]
    features = model.extract_features(tokens)
    assert torch.equal(features, kept)
    assert model.encoder.train().layers[-1].training  # a view on the model's own layers, not a copy
    num_layers = 5 if settings.get("task_heads") == "extra_layer" else 4
    assert len(model.encoder.layers) == model.encoder.shape.num_layers == num_layers
    state = model.state_dict()
    for _ in range(2):  # from the pretrained checkpoint, and from the fine-tuned one
        fine_tuned = TeamsModel.build_model(model.cfg, fine_tuning_task()).eval()
        fine_tuned.load_state_dict(state, strict=True)
        assert torch.equal(fine_tuned.extract_features(tokens), features)
        state = fine_tuned.state_dict()


@pytest.mark.parametrize(
    ("pretrained", "representation", "message"),
    [
        (ONLY_RTD, "mws", "give --representation rtd"),
        (ONLY_MWS, "rtd", "give --representation mws"),
        ({"task_heads": "ffn"}, "rtd", "give --representation mws"),
    ],
)
def test_fine_tuning_a_missing_branch_is_refused(pretrained: dict, representation: str, message: str) -> None:
    cfg = TeamsConfig(**(TEAMS_SETTINGS | {"representation": representation}))
    fine_tuned = TeamsModel.build_model(cfg, fine_tuning_task())
    with pytest.raises(UserError, match=message):
        fine_tuned.load_state_dict(small_teams(**pretrained).state_dict(), strict=True)
