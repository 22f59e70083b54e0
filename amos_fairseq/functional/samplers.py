"""The samplers of the objectives: what :func:`~amos_fairseq.functional.output_layer.output_layer` samples from each chunk.

The PyTorch path calls a sampler with the logits [K,n,V] of a chunk minus the maximum of each depth and position, their exp
[K,n,V], and the slice of the N positions that the chunk covers. Tokens that are never sampled have the logit
NEVER_SAMPLED_LOGIT and the weight 0.

The Triton path writes no such tensors. It calls ``depth_weights`` for the weights of the depths, and ``sample`` with a
:class:`ChunkMixture`. The distribution is the same.

Shapes: K depths, N positions, n positions of a chunk, V padded vocabulary size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from amos_fairseq.functional.fast_sampling import (
    TopK,
    gumbel_top_k_sampling,
    sample_with_replacement,
    sample_without_replacement,
    scores_outside_top_k,
    top_k_of_samples,
)
from amos_fairseq.functional.logit_chunks import NEVER_SAMPLED_LOGIT
from amos_fairseq.functional.truncated_gumbel_softmax import truncated_mass

# Positions of a batch at which the truncated mass is measured, with V random numbers each.
MEASURED_POSITIONS = 4


class ChunkMixture(Protocol):
    """softmax(sum_d gamma^(d) logits^(d)) at the n positions of a chunk, over the tokens that may be sampled.

    It is represented by sums over blocks of tokens. No method converts all logits of the chunk to float32.
    """

    @property
    def total(self) -> Tensor:
        """The sum of the weights, which are exp(mixed logit - largest mixed logit): [n,1] float32."""

    def sample(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Sample S tokens [n,S] int64 with replacement, and return the logits of each depth there, [n,S,K] float32."""

    def exclude(self, tokens: Tensor) -> None:
        """Exclude ``tokens`` [n] int64, one per position, from later samples."""

    def weights(self, num_positions: int) -> Tensor:
        """Return the weights of all tokens at the first positions: [num_positions,V] float32."""

    def most_likely(self, num_tokens: int) -> Tensor:
        """Return the tokens of the largest logits, of one depth: [n,num_tokens] int64. Overwrites logits: the last call."""


class MixtureSampler(Protocol):
    """The methods of a sampler that :func:`output_layer` calls with ``with_triton``."""

    def depth_weights(self, chunk: slice, device: torch.device) -> Tensor:
        """Return gamma at the positions of ``chunk``: [n,K] float32, contiguous."""

    def sample(self, mixture: ChunkMixture, chunk: slice) -> tuple[Tensor, ...]:
        """Return the outputs of a call with logits, [n,...] each; from other random numbers, so equal in distribution."""


@dataclass(frozen=True)
class ReplacementSampler:
    """Sample one token of softmax(logits / temperature) for every position, of one depth.

    Attributes:
        temperature: above 0.
        excluded: [N] int64, a token that is not sampled at its position; None excludes nothing.
    """

    temperature: float = 1.0
    excluded: Tensor | None = None

    def __call__(self, logits: Tensor, weights: Tensor, chunk: slice) -> tuple[Tensor]:
        """Return tokens [n] int64."""
        logits, weights = logits[0], weights[0]
        if self.excluded is not None:
            exclude_tokens(logits, self.excluded[chunk])
        if self.excluded is not None or self.temperature != 1:
            weights = softmax_weights(logits.div_(self.temperature))
        return (sample_with_replacement(weights, 1).squeeze(1),)

    def depth_weights(self, chunk: slice, device: torch.device) -> Tensor:
        return torch.full((chunk.stop - chunk.start, 1), 1 / self.temperature, device=device)

    def sample(self, mixture: ChunkMixture, chunk: slice) -> tuple[Tensor]:
        if self.excluded is not None:
            mixture.exclude(self.excluded[chunk])
        return (mixture.sample(1)[0].squeeze(1),)


@dataclass(frozen=True)
class ReplacementAndNegativeSampler:
    """Sample one token of the softmax for every position and, independently, the negatives of TEAMS (section 3.1).

    Attributes:
        originals: [N] int64, which are not negatives of their positions.
        num_negatives: K of TEAMS.
        hardest: use the most likely tokens instead of samples without replacement.
    """

    originals: Tensor
    num_negatives: int
    hardest: bool

    def __call__(self, logits: Tensor, weights: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return tokens [n] and negatives [n, num_negatives], int64."""
        sampled = sample_with_replacement(weights[0], 1).squeeze(1)
        others = exclude_tokens(logits[0], self.originals[chunk])
        if self.hardest:
            return sampled, others.topk(self.num_negatives).indices
        return sampled, sample_without_replacement(softmax_weights(others, all_above_0=True), self.num_negatives)

    def depth_weights(self, chunk: slice, device: torch.device) -> Tensor:
        return ReplacementSampler().depth_weights(chunk, device)

    def sample(self, mixture: ChunkMixture, chunk: slice) -> tuple[Tensor, Tensor]:
        sampled = mixture.sample(1)[0].squeeze(1)
        mixture.exclude(self.originals[chunk])
        if self.hardest:
            return sampled, mixture.most_likely(self.num_negatives)
        negatives: list[Tensor] = []
        for _ in range(self.num_negatives):
            if negatives:
                mixture.exclude(negatives[-1])
            negatives.append(mixture.sample(1)[0].squeeze(1))
        return sampled, torch.stack(negatives, dim=1)


@dataclass(frozen=True)
class MixtureReplacementSampler:
    """Sample one token of the mixture of all depths for every position, and the entries of its truncated Gumbel-Softmax.

    Attributes:
        mixture_weights: gamma [N,K] float32.
        num_entries: J, the maximum number of entries; 0 where no gradient needs them.
        temperature: tau of Gumbel-Softmax.
    """

    mixture_weights: Tensor
    num_entries: int = 0
    temperature: float = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, chunk: slice) -> tuple[Tensor, ...]:
        """Return the sampled tokens [n].

        With entries, return also their tokens and scores [n,J], their logits [n,J,K], and the truncated mass at some of the
        positions [0 to n].
        """
        mixed = softmax_weights(mix(logits, self.mixture_weights[chunk]))
        if not self.num_entries:
            return (sample_with_replacement(mixed, 1).squeeze(1),)
        top_k = gumbel_top_k_sampling(mixed, self.num_entries)
        depth_logits = logits.gather(-1, top_k.tokens.expand(len(logits), -1, -1)).permute(1, 2, 0)
        mass = self.measure_truncated_mass(mixed[: num_measured(chunk)], top_k)
        return top_k.tokens[:, 0], top_k.tokens, top_k.scores, depth_logits, mass

    def depth_weights(self, chunk: slice, device: torch.device) -> Tensor:
        return self.mixture_weights[chunk].contiguous()

    def sample(self, mixture: ChunkMixture, chunk: slice) -> tuple[Tensor, ...]:
        tokens, depth_logits = mixture.sample(self.num_entries or 1)
        if not self.num_entries:
            return (tokens.squeeze(1),)
        top_k = top_k_of_samples(tokens, mixture.total)
        mass = self.measure_truncated_mass(mixture.weights(num_measured(chunk)), top_k)
        return tokens[:, 0], tokens, top_k.scores, depth_logits, mass

    def measure_truncated_mass(self, weights: Tensor, top_k: TopK) -> Tensor:
        """Return the truncated mass at the first positions of a chunk, those of ``weights`` [count,V]."""
        first = TopK(*(part[: len(weights)] for part in top_k))
        return truncated_mass(first.scores, scores_outside_top_k(weights, first), self.temperature)


def num_measured(chunk: slice) -> int:
    """Return at how many positions of a chunk the truncated mass is measured, at most: at the first ones of the batch."""
    return MEASURED_POSITIONS if chunk.start == 0 else 0


def mix(logits: Tensor, mixture_weights: Tensor) -> Tensor:
    """Compute sum_d gamma^(d) logits^(d) up to a constant of each position: [K,n,V], [n,K] -> [n,V]."""
    mixed = logits[0] * mixture_weights[:, :1]
    for depth in range(1, len(logits)):
        mixed.addcmul_(logits[depth], mixture_weights[:, depth : depth + 1])
    return mixed


def exclude_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Set ``logits`` [n,V] to NEVER_SAMPLED_LOGIT at ``tokens`` [n], in place."""
    return logits.scatter_(-1, tokens.unsqueeze(-1), NEVER_SAMPLED_LOGIT)


def softmax_weights(logits: Tensor, all_above_0: bool = False) -> Tensor:
    """Compute exp(logits - maximum) of each position in place of the logits [n,V].

    ``all_above_0`` gives every token that may be sampled at least e^-80, about 2e-35. This changes no distribution, and leaves
    a token to sample when all likelier ones are removed.
    """
    never_sampled = logits < NEVER_SAMPLED_LOGIT / 2 if all_above_0 else None
    logits.sub_(logits.amax(-1, keepdim=True))
    if never_sampled is None:
        return logits.exp_()
    return logits.clamp_(min=-80.0).exp_().masked_fill_(never_sampled, 0.0)
