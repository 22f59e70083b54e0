"""The encoder with heads for labels of words, or for dependency trees."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from amos_fairseq.downstream.model import ExportedHead, FineTunedModel
from amos_fairseq.downstream.words.views import CROSS_VIEWS, CrossViews, WordOutput, predict_views
from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.configuration import make_transform
from amos_fairseq.models.pretraining import reads_heads
from amos_fairseq.modules.heads import transformed

WORD_HEADS = "word_heads."
TREES = "dependency_trees"  # name of the head for trees


class TaggingHead(nn.Module):
    """Predict the label of a word from the state of its first piece: dropout and one linear layer, as Hugging Face's models for
    token classification; those of ModernBERT have a ``transform`` before it."""

    def __init__(self, width: int, num_labels: int, dropout: float, transform: nn.Module | None = None):
        super().__init__()
        self.num_outputs = num_labels
        self.transform = transform
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, num_labels)

    def forward(self, states: Tensor, is_padding: Tensor | None = None) -> Tensor:
        """[...,D] -> logits [..., labels] float32. ``is_padding`` is unused: no word reads another one."""
        return self.output(self.dropout(transformed(states, self.transform))).float()

    def new_view(self) -> "ViewHead":
        return ViewHead(self.output.in_features, self.output.out_features)


class ViewHead(nn.Module):
    """An auxiliary prediction module for labels of words: linear, ReLU, linear (thesis, section 4.2.2). Departure: the hidden
    layer has the width of the encoder, in the thesis 512."""

    def __init__(self, width: int, num_labels: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, num_labels)

    def forward(self, states: Tensor, is_padding: Tensor | None = None) -> Tensor:
        """[...,D] -> logits [..., labels] float32; ``is_padding`` is unused."""
        return self.output(relu(self.hidden(states))).float()


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
        slots (``is_padding``, [B,W] bool) and for a word as its own head. ``states``: [B,W,D] of the words as heads;
        ``dependents``: the same as dependents, None for ``states``."""
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


@reads_heads(WORD_HEADS)
class WordModel(FineTunedModel):
    head_class: type[nn.Module] = TaggingHead

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refuse_pooling("labels of words")
        self.word_heads = nn.ModuleDict()
        self.cross_views: CrossViews | None = None

    @property
    def heads(self) -> nn.ModuleDict:
        return self.word_heads

    def exported_head(self, name: str | None) -> ExportedHead | None:
        head = self.word_heads[name]
        return ExportedHead("token_classification", head, head, "its head for labels of words")

    def register_word_head(self, name: str, num_labels: int) -> None:
        cfg, head = self.cfg, self.head_class
        self.word_heads[name] = head(cfg.encoder_embed_dim, num_labels, cfg.pooler_dropout, make_transform(cfg))
        self.initialize(self.word_heads[name])

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        for key, value in state_dict.items():
            if match := re.fullmatch(r"word_heads\.(\w+)\.output\.weight", key):
                self.register_word_head(match.group(1), num_labels=value.size(0))

    def register_cross_views(self, views: Sequence[str], mask: int) -> None:
        """Add the auxiliary modules of all heads. ``mask``: the token ``<mask>``."""
        if self.cfg.freeze_encoder:
            raise UserError("--views train the encoder, which --freeze-encoder keeps as it is: leave one of them out")
        num_layers = max(1, len(self.encoder.layers) // 2)
        self.cross_views = CrossViews(self.cfg.encoder_embed_dim, views, self.word_heads, num_layers, mask)
        self.initialize(self.cross_views)

    def forward(
        self,
        src_tokens: Tensor,
        word_positions: Tensor,
        lengths: Sequence[int] | None = None,
        rows_of_heads: Mapping[str, Tensor] | None = None,
        unlabeled: Mapping[str, Any] | None = None,
    ) -> WordOutput:
        """Predict the labels of the words of sentences, [B,T] int64. ``word_positions``: [B,W] int64, the first piece of each
        word, 0 in padded slots. ``rows_of_heads``: the sentences, [b] int64, for which each head predicts; by default all.
        ``unlabeled``: the arguments of ``predict_views``."""
        logits = self.predict_words(self.extract_features(src_tokens, lengths), word_positions, rows_of_heads)
        return WordOutput(logits) if unlabeled is None else WordOutput(logits, *predict_views(self, **unlabeled))

    def predict_words(
        self, states: Tensor, word_positions: Tensor, rows_of_heads: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of each head, from the states [B,T,D] at the first pieces [B,W]; see :meth:`forward`."""
        words, is_padding = gather_positions(states, word_positions), word_positions.eq(0)
        if rows_of_heads is None:
            return {name: head(words, is_padding) for name, head in self.word_heads.items()}
        return {name: self.word_heads[name](words[rows], is_padding[rows]) for name, rows in rows_of_heads.items()}

    def take_heads(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Drop the modules of views from a checkpoint that is loaded without cross-view training."""
        if self.cross_views is None:
            for key in [key for key in state_dict if key.startswith(CROSS_VIEWS)]:
                del state_dict[key]


@reads_heads(f"{WORD_HEADS}{TREES}.")
class ParsingModel(WordModel):
    head_class = ParsingHead

    def exported_head(self, name: str | None) -> ExportedHead | None:
        raise ValueError("dependency trees")

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        if (weight := state_dict.get(f"{WORD_HEADS}{TREES}.relations.weight")) is not None:
            self.register_word_head(TREES, weight.size(0) // ParsingHead.HIDDEN)
