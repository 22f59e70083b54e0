"""Auxiliary predictions from parts of a sentence, for cross-view training (thesis, sections 4.1 and 4.2).

Shapes: B sentences, T tokens, W words, D width of the encoder.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from amos_fairseq.functional.positions import gather_positions

FULL, WORD_DROPOUT = "full", "word_dropout"
# What a view reads of a word, by the direction of attention that gives its states.
DIRECTIONS = {"forward": "past", "backward": "future", "future": "past", "past": "future"}
TAGGING_VIEWS = (FULL, *DIRECTIONS)
# Of the word as a head, and of the word as a dependent (section 4.2.3).
PARSING_VIEWS = (FULL, *(f"{head}-{word}" for head in ("forward", "backward") for word in ("forward", "backward")))
VIEW_LAYERS = ("half", "all")
REMOVED = 0.1  # of the words, section 4.3.2


class WordPlaces(NamedTuple):
    """Where the words of sentences are: first and last piece of each word, [B,W] int64, 0 in padded slots."""

    first: Tensor
    last: Tensor

    @property
    def is_word(self) -> Tensor:
        """True at words, False in padded slots: [B,W] bool."""
        return self.first.ne(0)


class CrossViews(nn.Module):
    """The auxiliary modules of all heads, and the states that they read.

    Attention to one side gives a state for each token that depends on the tokens up to it (``past``), or from it on
    (``future``). For word t

        forward:  the past state of its last piece
        backward: the future state of its first piece
        future:   the past state of the last piece of word t - 1
        past:     the future state of the first piece of word t + 1
        full:     the state of its first piece, of all layers and both sides, with dropout

    Learned states stand for the words before the first and after the last one.

    Departures: in the thesis they are the states of the LSTMs of the first of two layers.

    Args:
        width: D.
        views: names, of :data:`TAGGING_VIEWS` or :data:`PARSING_VIEWS`, and :data:`WORD_DROPOUT`, which has no module.
        heads: the primary prediction modules by name.
        num_layers: how many of the lower layers give the states of one side.
        mask: the token ``<mask>``.

    Attributes:
        names: of the views with a module.
        directions: of attention, that they need.
        removed: the token in place of words that are dropped; None without word dropout.
    """

    def __init__(self, width: int, views: Sequence[str], heads: Mapping[str, nn.Module], num_layers: int, mask: int):
        super().__init__()
        self.num_layers = num_layers
        self.removed = mask if WORD_DROPOUT in views else None
        self.names = views = tuple(view for view in views if view != WORD_DROPOUT)
        parts = {part for name in views for part in name.split("-")}
        self.directions = tuple(sorted({DIRECTIONS[part] for part in parts - {FULL}}))
        self.boundaries = nn.Embedding(2, width) if parts & {"future", "past"} else None
        self.heads = nn.ModuleDict(
            {name: nn.ModuleDict({_key(view): head.new_view() for view in views}) for name, head in heads.items()}
        )

    def states(self, read: Mapping[str, Tensor], words: WordPlaces) -> dict[str, Tensor]:
        """Return what each view reads of each word, [B,W,D], from the states [B,T,D] of :attr:`directions` and ``full``."""
        states = {}
        if (full := read.get(FULL)) is not None:
            states[FULL] = gather_positions(full, words.first)
        if (past := read.get("past")) is not None:
            states["forward"] = gather_positions(past, words.last)
        if (future := read.get("future")) is not None:
            states["backward"] = gather_positions(future, words.first)
        if self.boundaries is None:
            return states
        none = torch.zeros_like(words.first[:, :1])
        before, after = self.boundaries.weight[:, None, None]
        if past is not None:
            # Two words may share a piece: these views read it of neither.
            previous = torch.minimum(torch.cat([none, words.last[:, :-1]], dim=1), (words.first - 1).clamp(min=0))
            is_first = torch.arange(words.first.size(1), device=previous.device)[:, None] == 0  # [W,1]
            states["future"] = torch.where(is_first, before.to(past), gather_positions(past, previous))
        if future is not None:
            following = torch.cat([words.first[:, 1:], none], dim=1)
            is_last = following.eq(0).unsqueeze(-1)  # [B,W,1]
            following = torch.maximum(following, words.last + 1).clamp(max=future.size(1) - 1)
            states["past"] = torch.where(is_last, after.to(future), gather_positions(future, following))
        return states

    def forward(self, states: Mapping[str, Tensor], is_padding: Tensor) -> dict[str, dict[str, Tensor]]:
        """Predict from each view, by head and view.

        Args:
            states: [B,W,D], by what a view reads of a word.
            is_padding: [B,W] bool, True at padded slots.
        """
        predictions: dict[str, dict[str, Tensor]] = {}
        for head, modules in self.heads.items():
            predictions[head] = {}
            for view in self.names:
                own, *other = (states[part] for part in view.split("-"))
                predictions[head][view] = modules[_key(view)](own, is_padding, *other)
        return predictions


def _key(view: str) -> str:
    """Return the name of a view as a key of a module, which "forward" itself cannot be."""
    return f"{view}_view"


def remove_words(tokens: Tensor, words: WordPlaces, mask: int) -> Tensor:
    """Replace all pieces of :data:`REMOVED` of the words, chosen at random, by ``<mask>``: [B,T] int64 -> [B,T].

    This is the word dropout of section 4.3.2, with ``<mask>`` as its token ``REMOVED``.
    """
    removed = (torch.rand(words.first.shape, device=tokens.device) < REMOVED) & words.is_word
    # +1 at the first piece of a removed word and -1 behind its last one: the sum is above 0 in between.
    change = torch.zeros(len(tokens), tokens.size(1) + 1, dtype=torch.int64, device=tokens.device)
    change = change.scatter_add(1, words.first, removed.long()).scatter_add(1, words.last + 1, -removed.long())
    return torch.where(change[:, :-1].cumsum(1) > 0, mask, tokens)


def number_of_view_layers(setting: str, num_layers: int) -> int:
    """Return how many of the lower layers of an encoder the views with one direction read."""
    return num_layers if setting == "all" else max(1, num_layers // 2)
