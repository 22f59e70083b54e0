"""Cross-view training: labeled sentences with unlabeled ones beside them, and the loss (thesis, section 4.1)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq import metrics
from fairseq.data import ConcatDataset, FairseqDataset
from torch import Tensor

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.downstream.words.dataset import MixedSentences, TaggedSentences, WordSequences
from amos_fairseq.downstream.words.model import WordOutput

KL, UNLABELED_WORDS, CONFIDENT_WORDS, LABELED_LOSS = "_kl_", "_unlabeled_words", "_confident_words", "_labeled_loss"


class WithUnlabeled(FairseqDataset):
    """Each labeled sentence of an epoch with one unlabeled sentence, so that their batches have the same size (Table 4.1).

    An index is a place in the epoch; :meth:`begin_epoch` sets which sentence is there. The n-th labeled sentence since the
    beginning of the training has the n-th sentence of an endless sequence of permutations of the unlabeled ones: it depends on
    the seed and the place alone, and all are read once before one is read again.

    Attributes:
        weight: the expected number of labeled words for an unlabeled one.
    """

    def __init__(
        self, labeled: TaggedSentences | MixedSentences, unlabeled: Sequence[WordSequences], seed: int
    ) -> None:
        self.labeled, self.unlabeled = labeled, ConcatDataset(unlabeled)
        self.collate_unlabeled = unlabeled[0].collater
        self.seed, self.training, self.source = seed, True, labeled.source
        means = [sentences.words_per_sentence for sentences in unlabeled]
        words_per_sentence = np.average(means, weights=list(map(len, unlabeled)))
        self.weight = float(labeled.words_per_sentence / words_per_sentence)
        self.begin_epoch(np.arange(len(labeled)), 0, by_length=False)

    def __len__(self) -> int:
        return len(self.labeled)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False: a reused iterator would repeat the first epoch's order."""
        return False

    @property
    def epoch(self) -> int:
        return self.labeled.epoch

    def set_epoch(self, epoch: int) -> None:
        self.labeled.set_epoch(epoch)

    def begin_epoch(self, order: np.ndarray, first: int, by_length: bool) -> np.ndarray:
        """Set the labeled sentences of the epoch, and return their places: [N] int64.

        Args:
            order: [N] int64, indices of ``labeled``.
            first: number of sentences in all epochs before.
            by_length: give the longest unlabeled sentence of the epoch to the longest labeled one, and so on, so that batches
                of similar lengths stay such.
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


def add_cross_views(loss: Tensor, output: WordOutput, sample: dict, task: Any) -> tuple[Tensor, dict[str, Any]]:
    """Add c sum_w sum_j KL(p_w || p_w^j) to the summed loss of labeled words, nats, float32 scalars (thesis, section 4.1.1).

    w are the unlabeled words of the batch; p is the prediction of a head, fixed and without dropout, and p^j that of a view.
    The terms of several heads are added; with ``view_heads`` "one", those of a single head train, which each micro-batch draws
    with the seed of its first sentence and the update (Table 4.3, without all-labeled). With the constant c, the expected
    number of labeled words for an unlabeled one, division by the labeled words gives the mean over unlabeled words, and sums
    over ranks and accumulated batches are exact. Words that are not :func:`confident` count as words without divergence.

    Args:
        task: ``SequenceTaggingTask``, for its settings of the views.

    Returns:
        The loss, as it is where there are no views, and the sums to log.
    """
    if not output.views:  # without unlabeled text, or before word dropout alone begins
        return loss, {}
    cfg = task.cfg
    is_word = sample["net_input"]["unlabeled"]["word_positions"].ne(0)
    is_hard = cfg.view_targets == "hard"
    sums: dict[str, Tensor] = {}
    num_confident = 0.0
    drawn = torch.randint(len(output.views), (), device=is_word.device)  # stays there: no wait for the device
    for number, (head, views) in enumerate(output.views.items()):
        fixed = output.fixed[head]
        counted = confident(fixed, is_word, cfg.view_confidence)
        num_confident = num_confident + counted.sum() / len(output.views)
        for view, scores in views.items():
            total = summed_divergence(fixed, scores, counted, is_hard)
            # The others are multiplied by 0, so that every module has a gradient on every rank.
            sums[view] = sums.get(view, 0.0) + (total if cfg.view_heads == "all" else total * drawn.eq(number))
    log = {LABELED_LOSS: loss.detach(), UNLABELED_WORDS: sample["num_unlabeled_words"]}
    log |= {f"{KL}{view}": total.detach() for view, total in sums.items()}
    if cfg.view_confidence:
        log[CONFIDENT_WORDS] = num_confident
    return loss + sample["unlabeled_weight"] * sum(sums.values()), log


def confident(fixed: Tensor, is_word: Tensor, least: float) -> Tensor:
    """Return which words have a class of the probability ``least`` or more: [B,W] bool (thesis, section 4.5).

    The arguments are those of :func:`summed_divergence`; of trees a class is a head with a relation.
    """
    return is_word & fixed.float().flatten(2).softmax(-1).amax(-1).ge(least)


def summed_divergence(fixed: Tensor, scores: Tensor, is_word: Tensor, hard: bool = False) -> Tensor:
    """Return sum_w KL(p_w || q_w), nats, a float32 scalar, with p = softmax(fixed) and q = softmax(scores) of word w.

    Args:
        fixed: [B,W,...] scores of all classes of a word, in one or more dimensions; they get no gradient.
        scores: the same shape.
        is_word: [B,W] bool, False at padded slots, which do not count.
        hard: p is 1 for its most likely class and 0 for all others (thesis, section 4.5, hard targets).

    A class that is excluded, with the score -inf, must be so on both sides; it adds nothing.
    """
    log_p = fixed.detach().float().flatten(2).log_softmax(-1)
    log_q = scores.float().flatten(2).log_softmax(-1)
    if hard:
        log_p = torch.full_like(log_p, -torch.inf).scatter(-1, log_p.argmax(-1, keepdim=True), 0.0)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # not -inf - -inf
    return terms.sum(-1).masked_fill(~is_word, 0.0).sum()


def log_cross_views(totals: dict[str, float]) -> None:
    """Log what :func:`add_cross_views` has summed, if anything: ``labeled_loss``, the mean over labeled words; ``kl_VIEW``, the
    mean over unlabeled words, of each view that trains so far; ``cvt_loss``, their sum; with a threshold, ``confident_words``,
    the share of unlabeled words that reach it."""
    if LABELED_LOSS not in totals:
        return
    num_words, num_unlabeled = totals["sample_size"], totals[UNLABELED_WORDS]
    metrics.log_scalar("labeled_loss", mean(totals[LABELED_LOSS], num_words), num_words, round=4)
    if CONFIDENT_WORDS in totals:
        metrics.log_scalar("confident_words", mean(totals[CONFIDENT_WORDS], num_unlabeled), num_unlabeled, round=4)
    divergences = {key.removeprefix("_"): total for key, total in totals.items() if key.startswith(KL)}
    if divergences:
        divergences["cvt_loss"] = sum(divergences.values())
    for name, total in divergences.items():
        metrics.log_scalar(name, mean(total, num_unlabeled), num_unlabeled, round=4)
