"""AMOS's mixture of MLM heads: its weights gamma (Eq. 3 and ablations), and prediction and sampling with it.

Shapes: B sequences, M masked positions per sequence, K depths, D width of the encoder, E width of the token embeddings,
V padded vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amos_fairseq.functional.mixture import TopEntries, adversarial_term, mix_logits, truncated_adversarial_term
from amos_fairseq.functional.output_layer import linear_cross_entropy, logit_chunks, output_layer
from amos_fairseq.functional.sampling import MixtureReplacementSampler, gumbel_max, gumbel_noise

# BERT's standard deviation; the paper does not give that of v. Near 0, so that gamma starts near 1 / K.
V_STD = 0.02

STRATEGIES = ("learned", "uniform", "random_layer", "layer_switch", "fixed")


class MixtureWeights(nn.Module):
    """Mixture weights gamma over K depths for every masked position.

    - ``learned``: gamma^(d) = softmax_d(v . f^(d)) (AMOS Eq. 3). v has no bias and exists only here.
    - ``uniform``: 1 / K ("- adv. train").
    - ``random_layer``: one depth per masked position, sampled uniformly ("w. random layer").
    - ``layer_switch``: depth j (counted from 0) from j / K of the planned updates on ("w. layer switch").
    - ``fixed``: K given values ("w. final mix weights").

    With one depth there is nothing to learn and gamma is 1 ("backbone" ablation).

    Args:
        strategy: one of the above.
        num_depths: K.
        width: D.
        fixed_weights: K values that sum to 1, for ``fixed``.
        max_update: planned updates, for ``layer_switch``.

    Raises:
        ValueError: values that are not a distribution over K depths, or no planned updates.
    """

    def __init__(
        self, strategy: str, num_depths: int, width: int, fixed_weights: Sequence[float] = (), max_update: int = 0
    ):
        super().__init__()
        if strategy == "fixed":
            is_distribution = min(fixed_weights, default=-1) >= 0 and abs(sum(fixed_weights) - 1) < 1e-3
            if len(fixed_weights) != num_depths or not is_distribution:
                problem = f"needs {num_depths} numbers of sum 1, none below 0, got {list(fixed_weights)}"
                raise ValueError(f"--fixed-mixture-weights {problem}")
        if strategy == "layer_switch" and max_update <= 0:
            raise ValueError("--mixture layer_switch needs --max-update, and no --minutes: it switches at equal parts")
        self.strategy = strategy if num_depths > 1 else "uniform"
        self.num_depths = num_depths
        self.fixed_weights = [weight / sum(fixed_weights) for weight in fixed_weights]
        self.max_update = max_update
        self.num_updates = 0
        if self.learned:
            self.v = nn.Parameter(torch.empty(width).normal_(std=V_STD))

    @property
    def learned(self) -> bool:
        return self.strategy == "learned"

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """K tensors f^(d) [B,M,D], before the MLM head -> gamma [B,M,K] float32; only ``learned`` has a gradient."""
        if self.learned:
            return torch.stack([f @ self.v for f in features], dim=-1).float().softmax(-1)
        position_shape, device = features[0].shape[:-1], features[0].device
        if self.strategy == "random_layer":
            depth = torch.randint(self.num_depths, position_shape, device=device)
            return depth.unsqueeze(-1).eq(torch.arange(self.num_depths, device=device)).float()
        # Filled on the device: torch.tensor would copy the values there and wait for it.
        weights = [torch.full(position_shape, weight, device=device) for weight in self.constant_weights()]
        return torch.stack(weights, dim=-1)

    def constant_weights(self) -> list[float]:
        """Return the K weights of the strategies that give every position the same."""
        if self.strategy == "fixed":
            return self.fixed_weights
        if self.strategy == "layer_switch":
            current = min(self.num_updates * self.num_depths // self.max_update, self.num_depths - 1)
            return [float(depth == current) for depth in range(self.num_depths)]
        return [1 / self.num_depths] * self.num_depths


def parse_weights(text: str) -> list[float]:
    """Parse "0.2,0.3,0.5" to [0.2, 0.3, 0.5]; raise ValueError for other text."""
    try:
        return [float(number) for number in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--fixed-mixture-weights needs numbers such as 0.2,0.3,0.5; got {text!r}") from None


class MixturePrediction(NamedTuple):
    """Losses of all depths, and tokens sampled from their mixture."""

    nll: Tensor  # [K,B,M] float32, -log p(original) of each depth, nats
    correct: Tensor  # [K,B,M] bool, no token is more likely at the depth than the original
    sampled: Tensor  # [B,M] int64, a token of the mixture
    # [B,M,E], zeros with the reversed gradient; None if nothing would receive it.
    adversarial_term: Tensor | None = None
    truncated_mass: Tensor | None = None  # [some positions] float32, the part of y outside the entries


@dataclass(frozen=True)
class OutputLayerWeights:
    """The output layer and the tokens that are never sampled."""

    embedding: Tensor  # [V,E], of the output layer
    biases: Tensor  # [1 or K,V]
    never_sampled: Tensor  # int64 ids of these tokens
    sampled_embedding: Tensor  # [V,E], with which the discriminator reads a sampled token, without a gradient
    with_triton: bool = False  # run the chunks in Triton, see functional.output_layer.runs_in_triton()


@dataclass(frozen=True)
class Adversary:
    """Settings of the discriminator's reversed gradient to the mixture."""

    temperature: float  # tau of Gumbel-Softmax
    hidden_gradient: float  # factor of the part that reaches h^(d)
    num_entries: int  # J, the maximum number of Gumbel-Softmax entries of predict_chunked(); 0 for all V


def predict_reference(
    hidden: Sequence[Tensor], gamma: Tensor, originals: Tensor, weights: OutputLayerWeights, adversary: Adversary | None
) -> MixturePrediction:
    """Compute the losses and sample, with all logits in memory: the reference implementation.

    ``hidden``: h^(d), K tensors [B,M,E]; ``gamma`` [B,M,K] float32; ``originals`` [B,M] int64; ``adversary`` is None if no
    gradient passes through the samples.
    """
    biases = list(weights.biases) * (len(hidden) // len(weights.biases))
    losses = [
        linear_cross_entropy(h, weights.embedding, bias, originals) for h, bias in zip(hidden, biases, strict=True)
    ]
    nll, correct = (torch.stack(part) for part in zip(*losses, strict=True))
    return MixturePrediction(nll, correct, *sample_reference(hidden, gamma, weights, adversary))


def sample_reference(
    hidden: Sequence[Tensor], gamma: Tensor, weights: OutputLayerWeights, adversary: Adversary | None
) -> tuple[Tensor, Tensor | None]:
    """Sample with Gumbel noise for every token; return tokens and adversarial term, with the leading shape of ``gamma``."""
    multiplier = adversary.hidden_gradient if adversary else 0.0
    logits = mix_logits(hidden, list(weights.biases), gamma, weights.embedding, multiplier)
    logits = logits.index_fill(-1, weights.never_sampled, float("-inf"))
    noise = gumbel_noise(logits)
    sampled = gumbel_max(logits, noise)
    if adversary is None:
        return sampled, None
    return sampled, adversarial_term(logits, noise, adversary.temperature, weights.sampled_embedding)


def predict_chunked(
    hidden: Sequence[Tensor], gamma: Tensor, originals: Tensor, weights: OutputLayerWeights, adversary: Adversary | None
) -> MixturePrediction:
    """Compute ``predict_reference`` in chunks of positions; same arguments.

    If ``adversary`` limits the entries, the samples have the same distribution, and the gradient lacks the entries beyond the
    largest ones: see ``amos_fairseq.functional.mixture``.
    """
    states = torch.stack([h.flatten(0, 1) for h in hidden])  # [K,N,E] with N = B M
    flat_gamma, targets, shape = gamma.flatten(0, 1), originals.flatten(), originals.shape
    num_entries = adversary.num_entries if adversary else 0
    is_exact = adversary is not None and not 0 < num_entries < len(weights.embedding)
    sampler = None
    if not is_exact:
        temperature = adversary.temperature if adversary else 1.0
        sampler = MixtureReplacementSampler(flat_gamma.detach(), num_entries, temperature)
    nll, correct, samples = output_layer(
        states, weights.embedding, weights.biases, targets, weights.never_sampled, sampler, weights.with_triton
    )
    nll, correct = nll.unflatten(1, shape), correct.unflatten(1, shape)
    if is_exact:
        sampled, term = sample_chunked_exactly(states, flat_gamma, weights, adversary)
        return MixturePrediction(nll, correct, sampled.view(shape), term.unflatten(0, shape))
    sampled = samples[0].view(shape)
    if adversary is None:
        return MixturePrediction(nll, correct, sampled)
    entries, mass = TopEntries(*samples[1:4]), samples[4]
    term = truncated_adversarial_term(
        entries,
        states,
        flat_gamma,
        weights.embedding,
        weights.sampled_embedding,
        adversary.temperature,
        adversary.hidden_gradient,
    )
    return MixturePrediction(nll, correct, sampled, term.unflatten(0, shape), mass)


def sample_chunked_exactly(
    states: Tensor, gamma: Tensor, weights: OutputLayerWeights, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """Compute ``sample_reference`` in chunks. The backward pass computes each chunk again, from the same noise."""

    def sample(chunk_states: Tensor, chunk_gamma: Tensor) -> tuple[Tensor, Tensor]:
        return sample_reference(chunk_states.unbind(0), chunk_gamma, weights, adversary)

    parts = [
        checkpoint(sample, states[:, chunk], gamma[chunk], use_reentrant=False)
        for chunk in logit_chunks(states, weights.embedding)
    ]
    sampled, term = (torch.cat(part) for part in zip(*parts, strict=True))
    return sampled, term
