"""Re-ranking n-best lists with pseudo-log-likelihoods (Clark, thesis 2021, section 5.4.5).

For an utterance s with the recogniser's score f(x | s) of each hypothesis x, the answer is

    argmax_x  f(x | s) + lambda PLL(x),

lambda the one of 0.05, 0.10, ..., 1.0 with the fewest word errors on development lists. The thesis chooses it for the
"clean" and the "other" part of its data separately: that is one call with its own files for each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from amos_fairseq.scoring.nbest import Hypothesis, Utterance
from amos_fairseq.scoring.word_errors import WordErrors

LAMBDAS = tuple(step / 20 for step in range(1, 21))

# PLL of a text, in nats.
PseudoLogLikelihoods = Mapping[str, float]


def best_hypothesis(utterance: Utterance, plls: PseudoLogLikelihoods, weight: float) -> Hypothesis:
    """The winner under ``weight`` lambda, the first of equals; 0 gives the recogniser's own choice."""
    return max(utterance.hypotheses, key=lambda each: each.score + weight * (plls[each.text] if weight else 0.0))


def word_errors(utterances: Sequence[Utterance], plls: PseudoLogLikelihoods, weight: float) -> WordErrors:
    """Errors of all winners under ``weight``."""
    return WordErrors.total(best_hypothesis(utterance, plls, weight).word_errors for utterance in utterances)


def oracle_errors(utterances: Sequence[Utterance]) -> WordErrors:
    """Errors of the best hypothesis of each list: what no re-ranking can go below."""
    return WordErrors.total(
        min((each.word_errors for each in utterance.hypotheses), key=lambda found: found.errors)
        for utterance in utterances
    )


def choose_lambda(utterances: Sequence[Utterance], plls: PseudoLogLikelihoods) -> tuple[float, dict[str, float]]:
    """The lambda with the fewest word errors, the smallest of equals; and the error rate in percent of each."""
    rates = {weight: word_errors(utterances, plls, weight).rate for weight in LAMBDAS}
    return min(LAMBDAS, key=rates.__getitem__), {f"{weight:.2f}": rates[weight] for weight in LAMBDAS}


def error_rates(utterances: Sequence[Utterance], plls: PseudoLogLikelihoods, weight: float) -> dict[str, Any]:
    """Word error rates in percent before and after re-ranking, and of an oracle, with what they were counted on."""
    before = word_errors(utterances, plls, 0.0)
    return {
        "utterances": len(utterances),
        "words": before.words,
        "wer_before": before.rate,
        "wer_after": word_errors(utterances, plls, weight).rate,
        "wer_oracle": oracle_errors(utterances).rate,
    }


def winners(utterances: Sequence[Utterance], plls: PseudoLogLikelihoods, weight: float) -> dict[str, dict[str, Any]]:
    """By id, the winner with its place in the list (from 1), its scores and its word errors."""
    found = {}
    for utterance in utterances:
        winner = best_hypothesis(utterance, plls, weight)
        found[utterance.id] = {
            "text": winner.text,
            "place": utterance.hypotheses.index(winner) + 1,
            "score": winner.score,
            "pll": plls[winner.text],
            "word_errors": winner.word_errors.errors,
        }
    return found
