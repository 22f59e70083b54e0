"""The consistency term of cross-view training."""

from typing import Any

import torch
from fairseq import metrics
from torch import Tensor

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.models.fine_tuning import WordOutput

KL, UNLABELED_WORDS, LABELED_LOSS = "_kl_", "_unlabeled_words", "_labeled_loss"


def add_cross_views(loss: Tensor, output: WordOutput, sample: dict) -> tuple[Tensor, dict[str, Any]]:
    """Add c sum_w sum_j KL(p_w || p_w^j) to the summed loss of labeled words, nats, float32 scalars (thesis, section 4.1.1).

    w are the unlabeled words of the batch; p is the prediction of a head, fixed and without dropout, and p^j that of a view. Of
    several heads it is the sum. With the constant c, the expected number of labeled words for an unlabeled one, division by
    the labeled words gives the mean over unlabeled words, and sums over ranks and accumulated batches are exact.

    Returns:
        The loss, as it is where there are no views, and the sums to log.
    """
    if output.views is None:
        return loss, {}
    is_word = sample["net_input"]["unlabeled"]["word_positions"].ne(0)
    sums: dict[str, Tensor] = {}
    for head, own in output.views.items():
        for view, scores in own.items():
            sums[view] = sums.get(view, 0.0) + summed_divergence(output.fixed[head], scores, is_word)
    log = {LABELED_LOSS: loss.detach(), UNLABELED_WORDS: sample["num_unlabeled_words"]}
    log |= {f"{KL}{view}": own.detach() for view, own in sums.items()}
    return loss + sample["unlabeled_weight"] * sum(sums.values()), log


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
    """Log what :func:`add_cross_views` has summed, if anything: ``labeled_loss``, the mean over labeled words; ``kl_VIEW``, the
    mean over unlabeled words, of each view that trains so far; and ``cvt_loss``, their sum."""
    if LABELED_LOSS not in totals:
        return
    num_words, num_unlabeled = totals["sample_size"], totals[UNLABELED_WORDS]
    metrics.log_scalar("labeled_loss", mean(totals[LABELED_LOSS], num_words), num_words, round=4)
    divergences = {key.removeprefix("_"): total for key, total in totals.items() if key.startswith(KL)}
    if divergences:
        divergences["cvt_loss"] = sum(divergences.values())
    for name, total in divergences.items():
        metrics.log_scalar(name, mean(total, num_unlabeled), num_unlabeled, round=4)
