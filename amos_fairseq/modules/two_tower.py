"""The two-tower cloze model: both sides of every token, read without the token itself.

Shapes: B sequences, T tokens, E width of the token embeddings, G width of a tower.
"""

import dataclasses

import torch
from torch import Tensor, nn

from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder


class TwoTower(nn.Module):
    """One encoder reads from left to right, another from right to left (thesis section 5.1.5, after Baevski et al., 2019).

    For token t the state of the first at t - 1 and of the second at t + 1 are put side by side, so what is said about a
    token never depends on it. Beyond the ends of a text stand learned states. Positions, token types and their LayerNorm
    are shared by the towers.

    Args:
        shape: of one tower; ``attends_to`` is set here.
    """

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.past = TransformerEncoder(dataclasses.replace(shape, attends_to="past"))
        self.future = TransformerEncoder(dataclasses.replace(shape, attends_to="future"))
        self.future.share_embeddings(self.past)
        self.boundaries = nn.Embedding(2, shape.width)  # before the first token, behind the last one

    def share_embeddings(self, other: TransformerEncoder) -> None:
        """Let both towers use the positions, token types and embedding LayerNorm of ``other``."""
        self.past.share_embeddings(other)
        self.future.share_embeddings(other)

    def forward(self, embeddings: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Token embeddings [B,T,E] -> [B,T,2G], of which entry t has read all real tokens but t.

        Args:
            embeddings: [B,T,E] token embeddings.
            padding_mask: [B,T] bool, True at padding, which stands behind a text; None when there is none.
        """
        before, behind = self.boundaries.weight.expand(len(embeddings), 2, -1).split(1, dim=1)  # each [B,1,G]
        read_past = self.past(embeddings, padding_mask)[-1]  # [B,T,G], entry t has read up to t
        read_future = self.future(embeddings, padding_mask)[-1]  # entry t has read from t on
        left = torch.cat([before, read_past[:, :-1]], dim=1)
        right = torch.cat([read_future[:, 1:], behind], dim=1)
        if padding_mask is not None:
            is_last = torch.cat([padding_mask[:, 1:], torch.ones_like(padding_mask[:, :1])], dim=1)
            right = torch.where(is_last.unsqueeze(-1), behind, right)
        return torch.cat([left, right], dim=-1)

    @property
    def num_layers(self) -> int:
        """Layers of a tower."""
        return len(self.past.layers)
