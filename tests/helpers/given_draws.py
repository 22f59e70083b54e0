"""Models that take given tokens or given noise instead of drawing, so that a test knows what the discriminator reads."""

from typing import Any

import pytest
from torch import Tensor

from amos_fairseq.functional import samplers
from amos_fairseq.functional.fast_sampling import TopK
from amos_fairseq.modules import mixture as mixtures


def give_draws(model: Any, sampled: Tensor, candidates: Tensor | None = None) -> None:
    """Replacements [B,M], and for TEAMS candidates [B,M,1+K], by whichever way of the output layer the model takes."""
    as_definition = sampled if candidates is None else (sampled, candidates)
    as_sampler = (sampled,) if candidates is None else (sampled, candidates[..., 1:])
    mlm_loss_and_sample = type(model).mlm_loss_and_sample
    model.sample = lambda *arguments: as_definition
    model.mlm_loss_and_sample = lambda *arguments: (*mlm_loss_and_sample(model, *arguments)[:2], as_sampler)


def give_noise(monkeypatch: pytest.MonkeyPatch, noise: Tensor) -> None:
    """AMOS perturbs its mixture with this Gumbel noise [B,M,V], whichever way it draws, for batches of B sequences."""

    def perturbed(weights: Tensor) -> Tensor:
        return weights.log() + noise.view_as(weights)

    def top_k_of_noise(weights: Tensor, k: int) -> TopK:
        largest = perturbed(weights).topk(k)
        return TopK(largest.indices, largest.values, (-largest.values[:, -1:]).double().exp())

    monkeypatch.setattr(mixtures, "gumbel_noise", lambda like: noise.view_as(like))
    monkeypatch.setattr(
        samplers, "sample_with_replacement", lambda weights, count: perturbed(weights).topk(count).indices
    )
    monkeypatch.setattr(samplers, "gumbel_top_k_sampling", top_k_of_noise)
