"""The encoder with heads for labels of words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import relu

from amos_fairseq.downstream.model import FineTunedModel
from amos_fairseq.downstream.words.view_modules import CrossViews, number_of_view_layers, predict_views
from amos_fairseq.downstream.words.views import CROSS_VIEWS, check_encoder_learns
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.configuration import make_transform
from amos_fairseq.models.pretrained_encoder import ExportedHead, reads_heads
from amos_fairseq.modules.heads import transformed

WORD_HEADS = "word_heads."


class TaggingHead(nn.Module):
    """Predict the label of a word from the state of its first piece: dropout and one linear layer.

    It is the classifier of Hugging Face's models for token classification; those of ModernBERT have a ``transform`` before it.
    """

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
    """An auxiliary prediction module for labels of words: linear, ReLU, linear (thesis, section 4.2.2).

    Departure: the hidden layer has the width of the encoder, in the thesis 512.
    """

    def __init__(self, width: int, num_labels: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, num_labels)

    def forward(self, states: Tensor, is_padding: Tensor | None = None) -> Tensor:
        """[...,D] -> logits [..., labels] float32; ``is_padding`` is unused."""
        return self.output(relu(self.hidden(states))).float()


class WordOutput(NamedTuple):
    """Predictions for the words of sentences, by name of the head: [B,W,labels] float32, or [B,W,1+W,relations] of trees.

    In cross-view training ``fixed`` and ``views`` are predictions for the unlabeled sentences: ``fixed`` of the head itself,
    without dropout and gradient, and ``views`` of each view's module.
    """

    logits: dict[str, Tensor]
    fixed: dict[str, Tensor] | None = None
    views: dict[str, dict[str, Tensor]] | None = None


@reads_heads(WORD_HEADS)
class WordModel(FineTunedModel):
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

    def register_tagging_head(self, name: str, num_labels: int) -> None:
        cfg = self.cfg
        self.word_heads[name] = TaggingHead(cfg.encoder_embed_dim, num_labels, cfg.pooler_dropout, make_transform(cfg))
        self.initialize(self.word_heads[name])

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        for key, value in state_dict.items():
            if match := re.fullmatch(r"word_heads\.(\w+)\.output\.weight", key):
                self.register_tagging_head(match.group(1), num_labels=value.size(0))

    def register_cross_views(self, views: Sequence[str], view_layers: str, mask: int) -> None:
        """Add the auxiliary modules of all heads.

        Args:
            views: names, of :mod:`amos_fairseq.downstream.words.views`.
            view_layers: ``half`` or ``all`` of the layers give the states of one direction.
            mask: the token ``<mask>``.
        """
        check_encoder_learns(self.cfg.freeze_encoder)
        num_layers = number_of_view_layers(view_layers, len(self.encoder.layers))
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
        """Predict the labels of the words of sentences.

        Args:
            src_tokens: [B,T] int64.
            word_positions: [B,W] int64, the first piece of each word, 0 in padded slots.
            lengths: see :meth:`extract_features`.
            rows_of_heads: the sentences, [b] int64, for which each head predicts; by default each head predicts for all.
            unlabeled: in cross-view training, the arguments of ``predict_views``: sentences without labels.
        """
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
