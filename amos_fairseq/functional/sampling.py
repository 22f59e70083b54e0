"""Where the tokens of all objectives are sampled: what ``amos_fairseq.functional.output_layer.output_layer`` samples
from each chunk of logits, and how a token is drawn, with a few random numbers per position instead of one per token.

The PyTorch path calls a sampler with the logits [K,n,V] of a chunk minus the maximum of each depth and position, their exp
[K,n,V], and the slice of the N positions that the chunk covers. Tokens that are never sampled have the logit
NEVER_SAMPLED_LOGIT and the weight 0. The Triton path writes no such tensors. It calls ``depth_weights`` for the weights of the
depths, and ``sample`` with a ``ChunkMixture``. The distribution is the same.

``gumbel_max`` and ``gumbel_top_k`` are the definition of that distribution, with one random number for every token.
They run with ``--kernels reference`` or ``--gumbel-entries 0``.

To draw a token, the vocabulary is divided into about sqrt(V) blocks of about sqrt(V): one random number selects the block by
the blocks' sums, another one the token within it. Cumulative sums are in float64, and a point is never placed at the end of an
interval, so a token of weight 0 is never sampled, nor one beyond the last.

Shapes: K depths, N positions, n positions of a chunk, V padded vocabulary size, S samples, G blocks of V / G tokens.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from amos_fairseq.functional.logit_chunks import NEVER_SAMPLED_LOGIT
from amos_fairseq.functional.mixture import truncated_mass

# Positions of a batch at which the truncated mass is measured, with V random numbers each.
MEASURED_POSITIONS = 4
# A factor below 1 whose product with a sum is rounded to less than the sum; its product with a number in [0, 1) is not larger.
BELOW_ONE = 1 - 2**-52


def gumbel_noise(like: Tensor) -> Tensor:
    """Sample Gumbel(0, 1) noise, float32, shape and device of ``like``, from PyTorch's default generator of that device."""
    return -torch.empty_like(like, dtype=torch.float32).exponential_().log()


def gumbel_max(logits: Tensor, noise: Tensor) -> Tensor:
    """Return argmax(logits + noise) -> [...] int64, an exact sample of softmax(logits) when ``noise`` is Gumbel(0, 1)."""
    return (logits + noise).argmax(-1)


def forbid_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return a copy of ``logits`` [..., V] with -inf at ``tokens`` [...] int64, one per position."""
    return logits.scatter(-1, tokens.unsqueeze(-1), float("-inf"))


def gumbel_top_k(logits: Tensor, noise: Tensor, k: int) -> Tensor:
    """Sample k tokens without replacement from softmax(logits): [..., V] -> [..., k] int64, in the order of sampling.

    The largest of logits + Gumbel(0, 1) is a sample of the softmax, and given it the second largest is one of the softmax
    over the other tokens, and so on. At least k logits of a position must be above -inf.
    """
    return (logits + noise).topk(k, dim=-1).indices


def sample_with_replacement(weights: Tensor, num_samples: int) -> Tensor:
    """Sample S independent tokens for each position: weights [N,V] float32, not negative -> [N,S] int64.

    Random numbers come from PyTorch's default generator of the device. Where all weights are 0, or one is nan, the result is
    a valid but meaningless token id.
    """
    blocks = split_into_blocks(weights)  # [N,G,V/G]
    block = pick(blocks.sum(-1), uniform(weights, num_samples))  # [N,S]
    column = pick(gather_blocks(blocks, block), uniform(weights, num_samples, 1)).squeeze(-1)
    return block * blocks.size(-1) + column


def sample_without_replacement(weights: Tensor, num_samples: int) -> Tensor:
    """Sample S different tokens for each position, one after another: [N,V] -> [N,S] int64, in the order of sampling.

    The distribution is that of ``gumbel_top_k``. ``weights`` is modified, and must have at least S entries above 0 for each
    position.
    """
    blocks = split_into_blocks(weights)
    sums = blocks.sum(-1)  # [N,G]
    tokens = []
    for _ in range(num_samples):
        block = pick(sums, uniform(weights, 1))  # [N,1]
        entries = gather_blocks(blocks, block)  # [N,1,V/G], a copy
        column = pick(entries, uniform(weights, 1, 1))  # [N,1,1]
        tokens.append(block * blocks.size(-1) + column.squeeze(-1))
        weights.scatter_(1, tokens[-1], 0.0)
        # Summed again: a difference of sums would leave a rounding error where no weight is left.
        sums.scatter_(1, block, entries.scatter_(-1, column, 0.0).sum(-1))
    return torch.cat(tokens, dim=1)


class TopK(NamedTuple):
    """The largest perturbed logits of ``gumbel_top_k_sampling`` and their tokens."""

    tokens: Tensor  # [N,k] int64, in descending order of their scores; the first one is a sample of the softmax
    scores: Tensor  # [N,k] float32, log weight + Gumbel noise of that token; -inf where the token is a repetition
    last_time: Tensor  # [N,1] float64, the time of the last event: no score but -inf is below -log of it


def gumbel_top_k_sampling(weights: Tensor, k: int) -> TopK:
    """Sample the k largest values of log(weights) + Gumbel noise, without noise for every token.

    A Gumbel number is -log of an exponential one, so log w_v + g_v = -log t_v with t_v exponential of rate w_v: the largest
    perturbed logit belongs to the smallest t_v. Let t_v be the first event of a Poisson process of rate w_v, which has just
    that distribution. All V processes together are one process of rate sum w, whose events belong to tokens that are
    independent samples in proportion to w. So the first k events are k samples with replacement and the cumulative sums of k
    exponential numbers, and the first event of each token among them gives, exactly, all t_v up to the last time: the largest
    perturbed logits, k of them, or fewer where a likely token occurs again. All other tokens have perturbed logits below -log
    of the last time.

    Args:
        weights: [N,V] float32, exp(logits) up to a factor of each position.
        k: the number of events.
    """
    return top_k_of_samples(sample_with_replacement(weights, k), weights.sum(-1, keepdim=True))


def top_k_of_samples(tokens: Tensor, total: Tensor) -> TopK:
    """Return the result of ``gumbel_top_k_sampling`` for events whose tokens are already sampled.

    Args:
        tokens: [N,k] int64, independent samples in proportion to the weights.
        total: [N,1], the sum of the weights.
    """
    gaps = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device).exponential_()
    times = running_sums(gaps) / total
    scores = -times.log().float()
    return TopK(tokens, scores.masked_fill(is_repeated(tokens), -math.inf), times[:, -1:])


def scores_outside_top_k(weights: Tensor, top_k: TopK) -> Tensor:
    """Sample log(weights) + Gumbel noise of all tokens outside ``top_k``, given ``top_k``: [N,V] float32, -inf at its tokens.

    An exponential number that is known to exceed a time exceeds it by another exponential number of the same rate.
    """
    excess = torch.empty_like(weights, dtype=torch.float64).exponential_() / weights
    scores = -(top_k.last_time + excess).log().float()
    return scores.scatter_(1, top_k.tokens, -math.inf)


def is_repeated(tokens: Tensor) -> Tensor:
    """Return True where the token occurs earlier at the same position: [N,S] int64 -> [N,S] bool."""
    ordered, order = tokens.sort(dim=-1, stable=True)
    repeats = torch.zeros_like(tokens, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeats).scatter_(-1, order, repeats)


def split_into_blocks(weights: Tensor) -> Tensor:
    """[N,V] -> [N,G,V/G], a view; V / G is the divisor of V that is nearest to its square root."""
    return weights.view(len(weights), -1, block_width(weights.size(-1)))


@functools.cache
def block_width(vocabulary_size: int) -> int:
    divisors = [width for width in range(1, vocabulary_size + 1) if vocabulary_size % width == 0]
    return min(divisors, key=lambda width: abs(width - math.sqrt(vocabulary_size)))


def gather_blocks(blocks: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen blocks of each position: [N,G,W], [N,S] -> [N,S,W]."""
    first = torch.arange(len(blocks), device=blocks.device).unsqueeze(1) * blocks.size(1)
    return blocks.flatten(0, 1).index_select(0, (first + chosen).flatten()).unflatten(0, chosen.shape)


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """Return the entry that each point selects: weights [...,W], points [...,S] in [0, 1) float64 -> [...,S] int64.

    It is the first entry whose cumulative share of the weights exceeds the point, so its own weight is above 0.
    """
    ends = running_sums(weights.double())
    entries = torch.searchsorted(ends, points * (ends[..., -1:] * BELOW_ONE), right=True)
    return entries.clamp_(max=weights.size(-1) - 1)  # exceeded only where all weights are 0, or one is nan


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of all entries up to each one: [...,W] float64, not negative -> [...,W] float64, never descending.

    PyTorch has no cumulative sum of floating point numbers with a fixed order on CUDA, and refuses it under
    ``torch.use_deterministic_algorithms``. There the sums are those of integers, which do not depend on the order: each entry
    is rounded to a multiple of 2^-52 of the sum of all.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    unit = values.sum(-1, keepdim=True) * 2**-52
    return (values / unit).round().long().cumsum(-1) * unit


def uniform(like: Tensor, *shape: int) -> Tensor:
    """Sample numbers in [0, 1), [N,*shape] float64.

    With the 24 bits of float32, tokens of probability below 6e-8 would get a wrong probability.
    """
    return torch.rand(len(like), *shape, dtype=torch.float64, device=like.device)


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


@dataclass(frozen=True)
class ReplacementSampler:
    """Sample one token of softmax(logits / temperature) for every position, of one depth."""

    temperature: float = 1.0
    excluded: Tensor | None = None  # [N] int64, a token that is not sampled at its position; None excludes nothing

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
    """Sample one token of the softmax for every position and, independently, the negatives of TEAMS (section 3.1)."""

    originals: Tensor  # [N] int64, which are not negatives of their positions
    num_negatives: int  # K of TEAMS
    hardest: bool  # use the most likely tokens instead of samples without replacement

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
    """Sample one token of the mixture of all depths for every position, and the entries of its truncated Gumbel-Softmax."""

    mixture_weights: Tensor  # gamma [N,K] float32
    num_entries: int = 0  # J, the maximum number of entries; 0 where no gradient needs them
    temperature: float = 1.0  # tau of Gumbel-Softmax

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


# With Triton, ``depth_weights`` returns gamma at the positions of a chunk, [n,K] float32, contiguous, and ``sample`` what a
# call with logits returns, from other random numbers, so equal in distribution.
MixtureSampler = ReplacementSampler | ReplacementAndNegativeSampler | MixtureReplacementSampler


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
