"""Auxiliary predictions from parts of a sentence, for cross-view training (thesis, sections 4.1 and 4.2).

Shapes: B sentences, T tokens, W words, D width of the encoder.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amos_fairseq.downstream.words.views import DIRECTIONS, FULL, WORD_DROPOUT
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.encoder import one_sided

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
        views: names, of ``TAGGING_VIEWS`` or ``PARSING_VIEWS``, and ``WORD_DROPOUT``, which has no module.
        heads: the primary prediction modules by name.
        num_layers: how many of the lower layers give the states of one side.
        mask: the token ``<mask>``, which replaces words that are dropped.
    """

    def __init__(self, width: int, views: Sequence[str], heads: Mapping[str, nn.Module], num_layers: int, mask: int):
        super().__init__()
        self.num_layers = num_layers
        self.removed = mask if WORD_DROPOUT in views else None
        self.names = views = tuple(view for view in views if view != WORD_DROPOUT)
        sides = {side for name in views for side in name.split("-")}
        self.directions = tuple(sorted({DIRECTIONS[side] for side in sides - {FULL}}))
        self.boundaries = nn.Embedding(2, width) if sides & {"future", "past"} else None
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
        """Predict from each view, by head and view, from the states [B,W,D] that it reads; ``is_padding``: [B,W] bool."""
        predictions: dict[str, dict[str, Tensor]] = {head: {} for head in self.heads}
        for head, modules in self.heads.items():
            for view in self.names:
                of_word, *of_dependent = (states[side] for side in view.split("-"))
                predictions[head][view] = modules[_key(view)](of_word, is_padding, *of_dependent)
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


def predict_views(
    model: Any,
    src_tokens: Tensor,
    lengths: Sequence[int],
    word_positions: Tensor,
    last_positions: Tensor,
    modules_alone: bool = False,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return what each head predicts for unlabeled sentences, fixed and without dropout, and what its views predict.

    Args:
        model: a ``WordModel`` with ``cross_views``.
        src_tokens: [B,T] int64.
        lengths: number of tokens of each sentence.
        word_positions, last_positions: [B,W] int64, first and last piece of each word, 0 in padded slots.
        modules_alone: only the auxiliary modules learn: the states get no gradient, and there is no word dropout.
    """
    cross_views: CrossViews = model.cross_views
    if modules_alone and not cross_views.names:
        return {}, {}
    words = WordPlaces(word_positions, last_positions)
    with torch.no_grad(), evaluating(model):
        fixed = model.predict_words(model.extract_features(src_tokens, lengths), word_positions)
    read = {FULL: model.extract_features(src_tokens, lengths)} if FULL in cross_views.names else {}
    read |= directed_states(model, src_tokens, lengths)
    if modules_alone:
        read = {name: states.detach() for name, states in read.items()}
    views = cross_views(cross_views.states(read, words), ~words.is_word)
    if cross_views.removed is not None and not modules_alone:
        kept = model.extract_features(remove_words(src_tokens, words, cross_views.removed), lengths)
        for name, logits in model.predict_words(kept, word_positions).items():
            views[name][WORD_DROPOUT] = logits
    return fixed, views


def directed_states(model: Any, tokens: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Compute the states [B,T,D] of each direction of attention that the views read, from tokens [B,T] int64."""
    embeddings, types = model.embed_tokens(tokens), model.token_types(tokens)
    states = {}
    for side in model.cross_views.directions:
        encoder = one_sided(model.encoder, side, model.cross_views.num_layers)
        states[side] = encoder(embeddings, token_types=types, lengths=lengths)[-1]
    return states


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, and on again where it was on."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def number_of_view_layers(setting: str, num_layers: int) -> int:
    """Return how many of the lower layers of an encoder the views with one direction read."""
    return num_layers if setting == "all" else max(1, num_layers // 2)
