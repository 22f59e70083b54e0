"""Models that take given tokens or given noise instead of drawing, so that a test knows what the discriminator reads."""

from typing import Any

import pytest
from torch import Tensor

from amos_fairseq.functional import replacements
from amos_fairseq.functional.drawing import Race
from amos_fairseq.modules import mixture_guesses


def give_draws(model: Any, sampled: Tensor, candidates: Tensor | None = None) -> None:
    """Replacements [B,M], and for TEAMS candidates [B,M,1+K], by whichever way of the output layer the model takes."""
    as_definition = sampled if candidates is None else (sampled, candidates)
    as_sampler = (sampled,) if candidates is None else (sampled, candidates[..., 1:])
    guess_and_draw = type(model).guess_and_draw
    model.sample = lambda *arguments: as_definition
    model.guess_and_draw = lambda *arguments: (*guess_and_draw(model, *arguments)[:2], as_sampler)


def give_noise(monkeypatch: pytest.MonkeyPatch, noise: Tensor) -> None:
    """AMOS perturbs its mixture with this Gumbel noise [B,M,V], whichever way it draws, for batches of B sequences."""

    def perturbed(weights: Tensor) -> Tensor:
        return weights.log() + noise.view_as(weights)

    def first_arrivals(weights: Tensor, num_arrivals: int) -> Race:
        largest = perturbed(weights).topk(num_arrivals)
        return Race(largest.indices, largest.values, (-largest.values[:, -1:]).double().exp())

    monkeypatch.setattr(mixture_guesses, "gumbel_noise", lambda like: noise.view_as(like))
    monkeypatch.setattr(replacements, "draw_rows", lambda weights, count: perturbed(weights).topk(count).indices)
    monkeypatch.setattr(replacements, "race", first_arrivals)
