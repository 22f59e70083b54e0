"""Generators that are not masked language models: two towers, and fixed token frequencies.

Shapes: B sequences, T tokens, E width of the token embeddings, G width of a tower, V padded vocabulary size.
"""

import dataclasses

import torch
from torch import Tensor, nn

from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder


class TwoTower(nn.Module):
    """The two-tower cloze model: predict each token from both sides (thesis section 5.1.5, after Baevski et al., 2019).

    One encoder attends to the left, another one to the right. The state of the first at t - 1 and of the second at t + 1 are
    concatenated for token t, so the prediction of a token never depends on the token itself. Learned states represent the
    positions before the first and after the last token. The towers share positions, token types and their LayerNorm.

    Args:
        shape: of one tower; ``attends_to`` is set here.
    """

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.past = dataclasses.replace(shape, attends_to="past").build()
        self.future = dataclasses.replace(shape, attends_to="future").build()
        self.future.share_embeddings(self.past)
        self.boundaries = nn.Embedding(2, shape.width)  # before the first token, after the last one

    def share_embeddings(self, other: TransformerEncoder) -> None:
        """Let both towers use the positions, token types and embedding LayerNorm of ``other``."""
        self.past.share_embeddings(other)
        self.future.share_embeddings(other)

    def forward(self, embeddings: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return states [B,T,2G]; entry t depends on all tokens but t.

        Args:
            embeddings: [B,T,E] token embeddings.
            padding_mask: [B,T] bool, True at padding, which follows the text; None if there is none.
        """
        first, last = self.boundaries.weight.expand(len(embeddings), 2, -1).split(1, dim=1)  # each [B,1,G]
        past_states = self.past(embeddings, padding_mask)[-1]  # [B,T,G], entry t depends on tokens up to t
        future_states = self.future(embeddings, padding_mask)[-1]  # entry t depends on tokens from t on
        left = torch.cat([first, past_states[:, :-1]], dim=1)
        right = torch.cat([future_states[:, 1:], last], dim=1)
        if padding_mask is not None:
            is_last = torch.cat([padding_mask[:, 1:], torch.ones_like(padding_mask[:, :1])], dim=1)
            right = torch.where(is_last.unsqueeze(-1), last, right)
        return torch.cat([left, right], dim=-1)

    @property
    def num_layers(self) -> int:
        """The number of layers of a tower."""
        return len(self.past.layers)


class TokenNoise(nn.Module):
    """A generator without input: one distribution over the vocabulary for every position (thesis section 5.3.2).

    It holds a count for each token of the vocabulary: 1, until :meth:`set_counts` sets the frequencies of a corpus. The
    counts are saved with the model, so a checkpoint samples without its corpus. They are integers, which no cast to half
    precision rounds.
    """

    def __init__(self, vocabulary_size: int):
        super().__init__()
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))

    def set_counts(self, counts: Tensor) -> None:
        """Set ``counts`` [tokens] int64 of the dictionary, which has at most V tokens; the counts of padding become 0."""
        self.counts.zero_()
        self.counts[: len(counts)] = counts

    def forward(self, positions: Tensor) -> Tensor:
        """Return logits for each of ``positions`` [...]: [...,V] float32, an expanded view of one row."""
        return self.counts.float().log().expand(*positions.shape, -1)
