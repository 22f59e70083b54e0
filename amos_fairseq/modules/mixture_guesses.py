"""What K depths guess at the masked positions and what their mixture puts there: fast, and as the definitions read.

Shapes: B sequences, M masked positions a sequence, K depths, E width of the token embeddings, V rows of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amos_fairseq.functional.gumbel_entries import Entries, entries_residual
from amos_fairseq.functional.linear_cross_entropy import linear_cross_entropy
from amos_fairseq.functional.mixture import mix_logits
from amos_fairseq.functional.output_layer import logit_chunks, output_layer
from amos_fairseq.functional.replacements import MixtureReplacements
from amos_fairseq.functional.sampling import adversarial_residual, gumbel_max, gumbel_noise


class MixtureGuesses(NamedTuple):
    nll: Tensor  # [K,B,M] float32, -log p(original) of each depth, nats
    correct: Tensor  # [K,B,M] bool, the depth's best guess is the original
    sampled: Tensor  # [B,M] int64, a token of the mixture
    residual: Tensor | None = (
        None  # [B,M,E], zeros that carry the reversed gradient; None where nobody would receive it
    )
    gumbel_residual: Tensor | None = (
        None  # [some positions] float32, mass of y beyond the entries kept; None if none is lost
    )


@dataclass(frozen=True)
class OutputRows:
    """The output layer: ``embedding`` [V,E], ``biases`` [1 or K,V], and which rows are never sampled: bool [V], and indices.

    ``with_triton`` runs its chunks in Triton: :func:`amos_fairseq.functional.output_layer.runs_in_triton`.
    """

    embedding: Tensor
    biases: Tensor
    is_unsampled: Tensor
    unsampled: Tensor
    with_triton: bool = False


@dataclass(frozen=True)
class Adversary:
    """How the discriminator's reversed gradient reaches the mixture.

    Attributes:
        temperature: tau of Gumbel-Softmax.
        hidden_gradient: what the part that reaches h^(d) is multiplied with.
        num_entries: J, entries of the Gumbel-Softmax that the fast way keeps at most; 0 keeps all V.
    """

    temperature: float
    hidden_gradient: float
    num_entries: int


def guess_by_definition(
    hidden: Sequence[Tensor], gamma: Tensor, originals: Tensor, rows: OutputRows, adversary: Adversary | None
) -> MixtureGuesses:
    """With all logits in memory.

    Args:
        hidden: h^(d), K tensors [B,M,E].
        gamma: [B,M,K] float32.
        originals: [B,M] int64.
        rows: the output layer.
        adversary: None where no gradient passes through the samples.
    """
    biases = list(rows.biases) * (len(hidden) // len(rows.biases))
    guesses = [linear_cross_entropy(h, rows.embedding, bias, originals) for h, bias in zip(hidden, biases, strict=True)]
    nll, correct = (torch.stack(part) for part in zip(*guesses, strict=True))
    return MixtureGuesses(nll, correct, *sample_by_definition(hidden, gamma, rows, adversary))


def sample_by_definition(
    hidden: Sequence[Tensor], gamma: Tensor, rows: OutputRows, adversary: Adversary | None
) -> tuple[Tensor, Tensor | None]:
    """Gumbel noise for every row: tokens and residual, both of any leading shape, as ``hidden`` and ``gamma`` have."""
    multiplier = adversary.hidden_gradient if adversary else 0.0
    logits = mix_logits(hidden, list(rows.biases), gamma, rows.embedding, multiplier)
    logits = logits.masked_fill(rows.is_unsampled, float("-inf"))
    noise = gumbel_noise(logits)
    sampled = gumbel_max(logits, noise)
    if adversary is None:
        return sampled, None
    return sampled, adversarial_residual(logits, noise, adversary.temperature, rows.embedding)


def guess_in_chunks(
    hidden: Sequence[Tensor], gamma: Tensor, originals: Tensor, rows: OutputRows, adversary: Adversary | None
) -> MixtureGuesses:
    """The same, a few positions at a time; arguments as for :func:`guess_by_definition`.

    Where the adversary keeps J entries, the samples have the same distribution, and the gradient differs by what lies beyond
    the entries: see :mod:`amos_fairseq.functional.gumbel_entries`.
    """
    states = torch.stack([h.flatten(0, 1) for h in hidden])  # [K,N,E] with N = B M
    weights, targets, shape = gamma.flatten(0, 1), originals.flatten(), originals.shape
    num_entries = adversary.num_entries if adversary else 0
    is_exact = adversary is not None and not 0 < num_entries < len(rows.embedding)
    sampler = None
    if not is_exact:
        sampler = MixtureReplacements(weights.detach(), num_entries, adversary.temperature if adversary else 1.0)
    nll, correct, drawn = output_layer(
        states, rows.embedding, rows.biases, targets, rows.unsampled, sampler, rows.with_triton
    )
    nll, correct = nll.unflatten(1, shape), correct.unflatten(1, shape)
    if is_exact:
        sampled, residual = sample_exactly(states, weights, rows, adversary)
        return MixtureGuesses(nll, correct, sampled.view(shape), residual.unflatten(0, shape))
    sampled = drawn[0].view(shape)
    if adversary is None:
        return MixtureGuesses(nll, correct, sampled)
    entries, lost = Entries(*drawn[1:4]), drawn[4]
    residual = entries_residual(
        entries, states, weights, rows.embedding, adversary.temperature, adversary.hidden_gradient
    )
    return MixtureGuesses(nll, correct, sampled, residual.unflatten(0, shape), lost)


def sample_exactly(states: Tensor, weights: Tensor, rows: OutputRows, adversary: Adversary) -> tuple[Tensor, Tensor]:
    """:func:`sample_by_definition` in chunks, which the backward pass computes again from the same noise."""

    def sample(part: Tensor, weights_of_part: Tensor) -> tuple[Tensor, Tensor]:
        return sample_by_definition(part.unbind(0), weights_of_part, rows, adversary)

    parts = [
        checkpoint(sample, states[:, places], weights[places], use_reentrant=False)
        for places in logit_chunks(states, rows.embedding)
    ]
    sampled, residual = (torch.cat(part) for part in zip(*parts, strict=True))
    return sampled, residual
