"""Electric: samples and scores, and what its variants refuse."""

import pytest
import torch
from frequencies import assert_shares
from small_models import NUM_TOKENS, small_batch, small_electric

from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import PretrainingBatch


def test_two_tower_has_no_features() -> None:
    model = small_electric("two_tower")
    with pytest.raises(UserError, match="it scores text"):
        model.extract_features(torch.tensor([[0, 5]]))


@torch.no_grad()
def test_samples_follow_noise_log_probs() -> None:
    """20,000 samples within 4.5 standard errors of exp(noise_log_probs), which sums to 1 over the ordinary tokens."""
    model, count = small_electric(), 20_000
    text = small_batch((12,))["net_input"]["tokens"]
    hidden = model.generate(text, None)[:, 4:5]  # [1,1,E]
    ordinary = torch.arange(4, 4 + NUM_TOKENS)
    expected = model.noise_log_probs(hidden.expand(1, NUM_TOKENS, -1), ordinary[None]).exp()[0]
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-5)
    torch.manual_seed(0)
    sampled = model.sample(hidden.expand(1, count, -1)).flatten()
    seen = torch.bincount(sampled, minlength=len(model.never_sampled_mask)) / count
    assert_shares(seen[ordinary], expected, count, errors=4.5)
    assert torch.isin(sampled, ordinary).all()
    assert model.noise_log_probs(hidden, torch.tensor([[2]])).item() == 0  # a special token


@torch.no_grad()
def test_log_probabilities_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_electric("electra_tt"), small_batch()["net_input"]["tokens"]
    whole = model.token_log_probs(tokens)
    # Logits of 7 tokens at a time, float32 of 64 rows each.
    monkeypatch.setattr("amos_fairseq.functional.logit_chunks.CHUNK_BYTES_ELSEWHERE", 7 * 64 * 4)
    assert torch.allclose(model.token_log_probs(tokens), whole, atol=1e-5)


@torch.no_grad()
def test_predicted_logits_match_the_loss() -> None:
    model, inputs = small_electric(), small_batch()["net_input"]
    logits, weights = model.predict_logits(PretrainingBatch(**inputs))
    originals = inputs["tokens"].gather(1, inputs["masked_positions"])
    nll = -logits[0].log_softmax(-1).gather(-1, originals[..., None])[..., 0]
    assert torch.allclose(nll, model(PretrainingBatch(**inputs)).mlm_nll, atol=1e-5)
    assert weights.equal(torch.ones(4, 3, 1))
