"""Re-ranking of n-best lists with pseudo-log-likelihoods (Clark, thesis 2021, section 5.4.5).

For an utterance s and the recognizer's score f(x | s) of each hypothesis x, the result is

    argmax_x  f(x | s) + lambda PLL(x),

where lambda is the one of 0.05, 0.10, ..., 1.0 with the fewest word errors on development lists. The thesis chooses it
separately for the "clean" and the "other" part of its data; that takes one call with its own files for each.

Departures, where the thesis is silent:

- PLL(x) of an empty hypothesis would be 0, above every other one. It is the lowest PLL of its list instead, so that an empty
  hypothesis wins by the recognizer's score alone.
- A hypothesis that is longer than the model's limit has no PLL and is skipped. A list without any PLL keeps the recognizer's
  choice.

A file of n-best lists holds the hypotheses of a recognizer or translator for each utterance, and the reference::

    {"utterance-1": {"reference": "what was said",
                     "hypotheses": [{"text": "what was set", "score": -3.2}, {"text": "what was said", "score": -3.5}]}}

``score`` is f(x | s), the log-probability of the text, or any score that is larger for better texts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import finite_number, parse_json, read_text, text_in

LAMBDAS = tuple(step / 20 for step in range(1, 21))

LARGEST_FILE_BYTES = 1 << 30  # 500 hypotheses for each utterance of LibriSpeech's test sets have a third of it
NUM_MARKS = 2  # <s> and </s>, the tokens of an empty text


class TextScore(NamedTuple):
    """PLL of a text in nats, None if it is longer than the model's limit; and its number of tokens, marks included."""

    pll: float | None
    num_tokens: int

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == NUM_MARKS


TextScores = Mapping[str, TextScore]


@dataclass(frozen=True)
class WordErrors:
    """Number of substituted, deleted and inserted words of hypotheses, and number of words of their references."""

    errors: int
    words: int

    @classmethod
    def of(cls, reference: str, hypothesis: str) -> "WordErrors":
        """Count the errors of one hypothesis. Words are separated by whitespace and compared as they are spelled."""
        words = reference.split()
        return cls(edit_distance(words, hypothesis.split()), len(words))

    @classmethod
    def total(cls, parts: Iterable["WordErrors"]) -> "WordErrors":
        """Add up all counts, so that a long sentence counts for more than a short one."""
        parts = list(parts)
        return cls(sum(part.errors for part in parts), sum(part.words for part in parts))

    @property
    def rate(self) -> float:
        """Word error rate in percent of the references' words, as in thesis Table 5.9; insertions can take it above 100."""
        return round(100 * self.errors / self.words, 4)


def edit_distance(reference: list[str], hypothesis: list[str]) -> int:
    """Return the minimum number of substitutions, deletions and insertions of words (Levenshtein distance)."""
    previous = list(range(len(hypothesis) + 1))
    for deletions, expected in enumerate(reference, start=1):
        current = [deletions]
        for i, word in enumerate(hypothesis):
            current.append(min(previous[i] + (word != expected), previous[i + 1] + 1, current[i] + 1))
        previous = current
    return previous[-1]


@dataclass(frozen=True)
class Hypothesis:
    text: str
    score: float
    word_errors: WordErrors


@dataclass(frozen=True)
class Utterance:
    """One non-empty n-best list, in the order of the file."""

    id: str
    reference: str
    hypotheses: list[Hypothesis]


def read_nbest(path: Path) -> list[Utterance]:
    """Read all lists of a file, in its order.

    Raises:
        UserError: the file cannot be read or has another format, a list is empty, a score is not a number, or all
            references are empty, so that the error rate is undefined.
    """
    text = read_text(path, "give a JSON file of n-best lists", LARGEST_FILE_BYTES)
    try:
        # A score that is nan is refused with its place.
        content = parse_json(text, object, object_pairs_hook=_unique_keys, parse_constant=float)
    except ValueError as error:  # from JSON or _unique_keys
        raise UserError(f"{path} {error}: give a JSON file of n-best lists") from error
    if not isinstance(content, dict) or not content:
        raise UserError(
            f'{path}: expected an object {{"id": {{"reference": ..., "hypotheses": [...]}}, ...}} of utterances'
        )
    utterances = [_utterance(path, id_, entry) for id_, entry in content.items()]
    if not any(utterance.reference.split() for utterance in utterances):
        raise UserError(f"{path}: all references are empty, the word error rate is undefined: give what was said")
    return utterances


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate ids: the second list would silently replace the first."""
    key, count = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 1)
    if count > 1:
        raise ValueError(f"{key!r:.100} occurs {count} times in one object")
    return dict(pairs)


def _utterance(path: Path, id_: str, entry: Any) -> Utterance:
    try:
        text_in(id_)  # it is written with the result
        reference = text_in(entry.get("reference") if isinstance(entry, dict) else None)
    except ValueError as error:
        raise UserError(f"{path}: utterance {id_!r:.100} needs a string 'reference' ({error})") from error
    entries = entry.get("hypotheses")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: utterance {id_!r:.100} needs a list 'hypotheses' with at least one entry")
    hypotheses = []
    for number, each in enumerate(entries, start=1):
        text, score = (each.get("text"), each.get("score")) if isinstance(each, dict) else (None, None)
        try:
            hypotheses.append(Hypothesis(text_in(text), finite_number(score), WordErrors.of(reference, text)))
        except ValueError as error:
            raise UserError(
                f"{path}: hypothesis {number} of {id_!r:.100} needs a 'text' and a finite number 'score' ({error})"
            ) from error
    return Utterance(id_, reference, hypotheses)


def compared_plls(utterance: Utterance, scores: TextScores) -> dict[Hypothesis, float]:
    """Return the PLL of each hypothesis that takes part, that of an empty one being the lowest; empty if there is none."""
    plls = {each: scores[each.text].pll for each in utterance.hypotheses if scores[each.text].pll is not None}
    lowest = min((pll for each, pll in plls.items() if not scores[each.text].is_empty), default=None)
    if lowest is None:
        return {}
    return {each: lowest if scores[each.text].is_empty else pll for each, pll in plls.items()}


def best_hypothesis(utterance: Utterance, scores: TextScores, weight: float) -> Hypothesis:
    """Return the best hypothesis with lambda ``weight``, the first one on a tie; 0 gives the recognizer's choice."""
    plls = compared_plls(utterance, scores) if weight else {}
    return max(plls or utterance.hypotheses, key=lambda each: each.score + weight * plls.get(each, 0.0))


def word_errors(utterances: Sequence[Utterance], scores: TextScores, weight: float) -> WordErrors:
    """Count the errors of the best hypotheses with lambda ``weight``."""
    return WordErrors.total(best_hypothesis(utterance, scores, weight).word_errors for utterance in utterances)


def oracle_errors(utterances: Sequence[Utterance]) -> WordErrors:
    """Count the errors of the hypothesis with the fewest errors in each list: the lower bound of any re-ranking."""
    return WordErrors.total(
        min((each.word_errors for each in utterance.hypotheses), key=lambda found: found.errors)
        for utterance in utterances
    )


def choose_lambda(utterances: Sequence[Utterance], scores: TextScores) -> tuple[float, dict[str, float]]:
    """Return the lambda with the fewest word errors, the smallest on a tie; and the error rate of each in percent."""
    rates = {weight: word_errors(utterances, scores, weight).rate for weight in LAMBDAS}
    return min(LAMBDAS, key=rates.__getitem__), {f"{weight:.2f}": rates[weight] for weight in LAMBDAS}


def error_rates(utterances: Sequence[Utterance], scores: TextScores, weight: float) -> dict[str, Any]:
    """Return word error rates in percent before and after re-ranking and of the oracle, with the counts behind them."""
    before = word_errors(utterances, scores, 0.0)
    return {
        "utterances": len(utterances),
        "words": before.words,
        "wer_before": before.rate,
        "wer_after": word_errors(utterances, scores, weight).rate,
        "wer_oracle": oracle_errors(utterances).rate,
    }


def winners(utterances: Sequence[Utterance], scores: TextScores, weight: float) -> dict[str, dict[str, Any]]:
    """Return the best hypothesis by id, with its place in the list (from 1), its scores and its word errors."""
    results = {}
    for utterance in utterances:
        best = best_hypothesis(utterance, scores, weight)
        results[utterance.id] = {
            "text": best.text,
            "place": utterance.hypotheses.index(best) + 1,
            "score": best.score,
            "pll": scores[best.text].pll,
            "word_errors": best.word_errors.errors,
        }
    return results
