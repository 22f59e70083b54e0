"""The consistency term of cross-view training."""

from typing import Any

import torch
from fairseq import metrics
from torch import Tensor

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.models.fine_tuning import WordOutput

KL, UNLABELED_WORDS = "_kl_", "_unlabeled_words"


def cross_view_loss(output: WordOutput, sample: dict, views: tuple[str, ...]) -> tuple[Tensor, dict[str, Any]]:
    """Return c sum_w sum_j KL(p_w || p_w^j), nats, a float32 scalar (thesis, section 4.1.1), and the sums to log.

    w are the unlabeled words of the batch; p is the prediction of a head, fixed and without dropout, and p^j that of a view. Of
    several heads it is the sum. With the constant c, the expected number of labeled words for an unlabeled one, division by
    the labeled words gives the mean over unlabeled words, and sums over ranks and accumulated batches are exact.

    Args:
        views: all of the task.
    """
    is_word = sample["net_input"]["unlabeled"]["word_positions"].ne(0)
    sums: dict[str, Any] = dict.fromkeys(views, 0.0)
    for head, own in output.views.items():
        for view, scores in own.items():
            fixed = output.fixed[head] if output.fixed else scores  # before --unlabeled-start: of no word
            sums[view] = sums[view] + summed_divergence(fixed, scores, is_word)
    log = {f"{KL}{view}": own.detach() if isinstance(own, Tensor) else own for view, own in sums.items()}
    return sample["unlabeled_weight"] * sum(sums.values()), log | {UNLABELED_WORDS: sample["num_unlabeled_words"]}


def summed_divergence(fixed: Tensor, scores: Tensor, is_word: Tensor) -> Tensor:
    """Return sum_w KL(p_w || q_w), nats, a float32 scalar, with p = softmax(fixed) and q = softmax(scores) of word w.

    Args:
        fixed: [B,W,...] scores of all classes of a word, in one or more dimensions; they get no gradient.
        scores: the same shape.
        is_word: [B,W] bool, False at padded slots, which do not count.

    A class that is excluded, with the score -inf, must be so on both sides; it adds nothing.
    """
    log_p = fixed.detach().float().flatten(2).log_softmax(-1)
    log_q = scores.float().flatten(2).log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # not -inf - -inf
    return terms.sum(-1).masked_fill(~is_word, 0.0).sum()


def log_cross_views(totals: dict[str, float]) -> None:
    """Log ``cvt_loss``, the mean over unlabeled words of the sum over views, and ``kl_VIEW``, that of each view."""
    num_words = totals.get(UNLABELED_WORDS, 0.0)
    if not num_words:
        return
    divergences = {key.removeprefix("_"): total for key, total in totals.items() if key.startswith(KL)}
    for name, total in ({"cvt_loss": sum(divergences.values())} | divergences).items():
        metrics.log_scalar(name, mean(total, num_words), num_words, round=4)
