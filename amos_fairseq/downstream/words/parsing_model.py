"""The encoder with a head for dependency trees."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from amos_fairseq.downstream.words.model import WORD_HEADS, WordModel
from amos_fairseq.models.configuration import make_transform
from amos_fairseq.models.pretrained_encoder import ExportedHead, reads_heads
from amos_fairseq.modules.heads import transformed

TREES = "dependency_trees"  # name of the head


class ParsingHead(nn.Module):
    """Score the edges of a dependency tree (thesis, section 4.2.3, after Dozat and Manning 2017).

        s(u, t, r) = ReLU(W_head h_u + b_head) (W_r + W) ReLU(W_dep h_t + b_dep)

    for the edge from a head u to a word t with the relation r; h is the state of the first piece of a word, and a learned
    vector for the root. One softmax over all pairs (u, r) follows.

    Departures: the thesis has the states of a BiLSTM over words. The size of both hidden layers is not in the thesis.
    """

    HIDDEN = 128

    def __init__(self, width: int, num_relations: int, dropout: float, transform: nn.Module | None = None):
        super().__init__()
        self.num_outputs = num_relations
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.root = nn.Embedding(1, width)
        self.head = nn.Linear(width, self.HIDDEN)
        self.dependent = nn.Linear(width, self.HIDDEN)
        self.shared = nn.Linear(self.HIDDEN, self.HIDDEN, bias=False)  # W
        self.relations = nn.Linear(self.HIDDEN, num_relations * self.HIDDEN, bias=False)  # W_r of all r

    def new_view(self) -> "ParsingHead":
        """Return an auxiliary module for one pair of views."""
        return ParsingHead(self.head.in_features, self.num_outputs, self.dropout.p)

    def forward(self, states: Tensor, is_padding: Tensor, dependents: Tensor | None = None) -> Tensor:
        """Return the scores [B,W,1+W,R] float32 of each word for each head, the root first, and each relation; -inf for padded
        slots and for a word as its own head.

        Args:
            states: [B,W,D] of the words as heads.
            is_padding: [B,W] bool, True at padded slots.
            dependents: [B,W,D] of the words as dependents; None for ``states``.
        """
        states = transformed(states, self.transform)
        dependents = states if dependents is None else transformed(dependents, self.transform)
        root = self.root.weight.expand(len(states), -1, -1).to(states)
        heads = relu(self.head(self.dropout(torch.cat([root, states], dim=1))))  # [B,1+W,h]
        dependents = relu(self.dependent(self.dropout(dependents)))  # [B,W,h]
        products = self.relations(heads).unflatten(-1, (-1, self.HIDDEN)) + self.shared(heads)[..., None, :]
        scores = torch.einsum("bwh,burh->bwur", dependents, products).float()
        no_root = torch.zeros_like(is_padding[:, :1])
        is_self = torch.eye(states.size(1), dtype=torch.bool, device=states.device)
        excluded = torch.cat([no_root, is_padding], dim=1)[:, None] | torch.cat(
            [is_self.new_zeros(len(is_self), 1), is_self], dim=1
        )
        return scores.masked_fill(excluded[..., None], -math.inf)


@reads_heads(f"{WORD_HEADS}{TREES}.")
class ParsingModel(WordModel):
    def exported_head(self, name: str | None) -> ExportedHead | None:
        raise ValueError("dependency trees")

    def register_parsing_head(self, num_relations: int) -> None:
        cfg = self.cfg
        self.word_heads[TREES] = ParsingHead(
            cfg.encoder_embed_dim, num_relations, cfg.pooler_dropout, make_transform(cfg)
        )
        self.initialize(self.word_heads[TREES])

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        if (weight := state_dict.get(f"{WORD_HEADS}{TREES}.relations.weight")) is not None:
            self.register_parsing_head(num_relations=weight.size(0) // ParsingHead.HIDDEN)
