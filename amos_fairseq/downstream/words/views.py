"""Cross-view training on unlabeled sentences (CVT; thesis, chapter 4): auxiliary predictions from parts of a sentence, labeled
sentences with unlabeled ones beside them, and the loss.

Shapes: B sentences, T tokens, W words, D width of the encoder.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq import metrics
from fairseq.data import ConcatDataset, FairseqDataset
from torch import Tensor, nn

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.downstream.words.dataset import MixedSentences, TaggedSentences, WordSequences
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import DIRECTIONS, FULL, WORD_DROPOUT
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.encoder import one_sided

CROSS_VIEWS = "cross_views."  # prefix of the weights of the modules, which only train
REMOVED = 0.1  # of the words, section 4.3.2
KL, UNLABELED_WORDS, LABELED_LOSS = "_kl_", "_unlabeled_words", "_labeled_loss"


def parse_views(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the views in ``a,b,...``, in the order of ``known``, which is that of their parameters in the optimizer."""
    views, allowed = set(filter(None, map(str.strip, text.split(",")))), (*known, WORD_DROPOUT)
    if views - {*allowed}:
        raise UserError(f"--views {text}: give some of {','.join(allowed)}")
    return tuple(view for view in allowed if view in views)


class WordOutput(NamedTuple):
    """Predictions for the words of sentences, by name of the head: [B,W,labels] float32, or [B,W,1+W,relations] of trees. In
    cross-view training also for the unlabeled sentences: ``fixed`` of the head itself, without dropout and gradient, ``views``
    of each module."""

    logits: dict[str, Tensor]
    fixed: dict[str, Tensor] | None = None
    views: dict[str, dict[str, Tensor]] | None = None


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
    """Replace all pieces of :data:`REMOVED` of the words, chosen at random, by ``<mask>``, the token ``REMOVED`` of the word
    dropout of section 4.3.2: [B,T] int64 -> [B,T]."""
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

    ``model``: a ``WordModel``. ``src_tokens``: [B,T] int64; ``word_positions``, ``last_positions``: [B,W] int64, first and last
    piece of each word, 0 in padded slots. ``modules_alone``: the states get no gradient, and there is no word dropout.
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


class WithUnlabeled(FairseqDataset):
    """Each labeled sentence of an epoch with one unlabeled sentence, so that their batches have the same size (Table 4.1).

    An index is a place in the epoch; :meth:`begin_epoch` sets which sentence is there. The n-th labeled sentence since the
    beginning of the training has the n-th sentence of an endless sequence of permutations of the unlabeled ones: it depends on
    the seed and the place alone. ``weight``: the expected number of labeled words for an unlabeled one.
    """

    def __init__(
        self, labeled: TaggedSentences | MixedSentences, unlabeled: Sequence[WordSequences], seed: int
    ) -> None:
        self.labeled, self.unlabeled = labeled, ConcatDataset(unlabeled)
        self.collate_unlabeled = unlabeled[0].collater
        self.seed, self.training, self.source = seed, True, labeled.source
        means = [sentences.words_per_sentence for sentences in unlabeled]
        self.weight = float(labeled.words_per_sentence / np.average(means, weights=list(map(len, unlabeled))))
        self.begin_epoch(np.arange(len(labeled)), 0, by_length=False)

    def __len__(self) -> int:
        return len(self.labeled)

    @property
    def epoch(self) -> int:
        return self.labeled.epoch

    def set_epoch(self, epoch: int) -> None:
        self.labeled.set_epoch(epoch)

    def begin_epoch(self, order: np.ndarray, first: int, by_length: bool) -> np.ndarray:
        """Set the labeled sentences of the epoch, indices ``order`` [N] int64, and return their places: [N] int64.

        ``first``: number of sentences in all epochs before. ``by_length``: give the longest unlabeled sentence of the epoch to
        the longest labeled one, and so on, so that batches of similar lengths stay such.
        """
        self.order, self.sizes = order, self.labeled.sizes[order]
        self.beside = self._endless(first, first + len(order))
        if by_length:
            ranks = self.sizes.argsort(kind="stable").argsort(kind="stable")
            self.beside = self.beside[self.unlabeled.sizes[self.beside].argsort(kind="stable")][ranks]
        return np.arange(len(order), dtype=np.int64)

    def _endless(self, first: int, last: int) -> np.ndarray:
        """Return the unlabeled sentences from place ``first`` to place ``last`` of the endless sequence."""
        size = len(self.unlabeled)
        start, stop = first // size, -(-last // size)
        passes = [
            keyed_generator(Purpose.UNLABELED, self.seed, number, 0).permutation(size) for number in range(start, stop)
        ]
        return np.concatenate([*passes, np.empty(0, dtype=np.int64)])[first - start * size : last - start * size]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the labeled sentence, with the other one as ``unlabeled``."""
        return self.labeled[int(self.order[index])] | {"unlabeled": self.unlabeled[int(self.beside[index])]}

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the labeled batch, with that of the other sentences as ``unlabeled`` in its ``net_input``."""
        batch = self.labeled.collater(samples)
        if batch:
            others = [sample["unlabeled"] for sample in samples]
            batch["net_input"]["unlabeled"] = self.collate_unlabeled(others)["net_input"]
            batch["num_unlabeled_words"] = sum(len(other["positions"]) for other in others)
            batch["unlabeled_weight"] = self.weight
        return batch


def add_cross_views(loss: Tensor, output: WordOutput, sample: dict) -> tuple[Tensor, dict[str, Any]]:
    """Add c sum_w sum_j KL(p_w || p_w^j) to the summed loss of labeled words, nats, float32 scalars (thesis, section 4.1.1).

    w are the unlabeled words of the batch; p is the prediction of a head, fixed and without dropout, and p^j that of a view.
    The terms of several heads are added. With the constant c, the expected number of labeled words for an unlabeled one,
    division by the labeled words gives the mean over unlabeled words, and sums over ranks and accumulated batches are exact.
    Return also the sums to log.
    """
    if not output.views:  # without unlabeled text, or before word dropout alone begins
        return loss, {}
    is_word = sample["net_input"]["unlabeled"]["word_positions"].ne(0)
    sums: dict[str, Tensor] = {}
    for head, views in output.views.items():
        for view, scores in views.items():
            sums[view] = sums.get(view, 0.0) + summed_divergence(output.fixed[head], scores, is_word)
    log = {LABELED_LOSS: loss.detach(), UNLABELED_WORDS: sample["num_unlabeled_words"]}
    log |= {f"{KL}{view}": total.detach() for view, total in sums.items()}
    return loss + sample["unlabeled_weight"] * sum(sums.values()), log


def summed_divergence(fixed: Tensor, scores: Tensor, is_word: Tensor) -> Tensor:
    """Return sum_w KL(p_w || q_w), nats, a float32 scalar, with p = softmax(fixed) and q = softmax(scores) of word w.

    Both are [B,W,...] scores of all classes of a word; ``fixed`` get no gradient. ``is_word``: [B,W] bool. A class that is
    excluded, with the score -inf, must be so on both sides; it adds nothing.
    """
    log_p = fixed.detach().float().flatten(2).log_softmax(-1)
    log_q = scores.float().flatten(2).log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # not -inf - -inf
    return terms.sum(-1).masked_fill(~is_word, 0.0).sum()


def log_cross_views(totals: dict[str, float]) -> None:
    """Log what :func:`add_cross_views` has summed, if anything: ``labeled_loss``, the mean over labeled words; ``kl_VIEW``, the
    mean over unlabeled words, of each view that trains so far; ``cvt_loss``, their sum."""
    if LABELED_LOSS not in totals:
        return
    num_words, num_unlabeled = totals["sample_size"], totals[UNLABELED_WORDS]
    metrics.log_scalar("labeled_loss", mean(totals[LABELED_LOSS], num_words), num_words, round=4)
    divergences = {key.removeprefix("_"): total for key, total in totals.items() if key.startswith(KL)}
    if divergences:
        divergences["cvt_loss"] = sum(divergences.values())
    for name, total in divergences.items():
        metrics.log_scalar(name, mean(total, num_unlabeled), num_unlabeled, round=4)
