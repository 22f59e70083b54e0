"""Exact match and F1 as SQuAD's official scripts count them, by the library that everybody uses for it."""

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

from amos_fairseq.errors import UserError
from amos_fairseq.squad.official_files import Question


@dataclass(frozen=True)
class _Example:
    """What the library asks of an example."""

    qas_id: str
    answers: List[Dict[str, str]]


def evaluate(
    questions: Iterable[Question],
    predictions: Dict[str, str],
    null_odds: Optional[Dict[str, float]] = None,
    null_threshold: float = float("inf"),
) -> Tuple[Dict[str, float], int]:
    """Scores of one prediction file.

    Args:
        null_odds: how likely each question has no answer, on any scale; with them the best thresholds are searched.
        null_threshold: a question whose odds are above it counts as not answered, whatever is predicted for it. The
            official script's own default, 1.0, is meant for probabilities; ours takes predictions as they stand.

    Returns:
        ``exact``, ``f1`` (percent) and ``total``; the same with ``HasAns_`` and ``NoAns_`` where there are such
        questions; with ``null_odds`` also ``best_exact``, ``best_exact_thresh``, ``best_f1``, ``best_f1_thresh``. And
        the number of questions without a prediction, which no score counts (as in the official script of 2.0).

    Raises:
        UserError: no question has a prediction, or one that has lacks its null odds.
    """
    from transformers.data.metrics.squad_metrics import squad_evaluate  # seconds to import

    examples = [_Example(q.id, [{"text": answer.text} for answer in q.answers]) for q in questions]
    answered = [example for example in examples if example.qas_id in predictions]
    if not answered:
        raise UserError("no question of the data set has a prediction: do both files belong together?")
    if null_odds is not None:
        without = next((example.qas_id for example in answered if example.qas_id not in null_odds), None)
        if without is not None:
            raise UserError(f"the question {without} has a prediction, but no null odds: give the file of the same run")
        null_odds = {example.qas_id: null_odds[example.qas_id] for example in answered}
    scores = squad_evaluate(answered, predictions, null_odds, null_threshold)
    if null_odds is None:  # the library then searches thresholds among odds that are all 0
        scores = {name: value for name, value in scores.items() if not name.startswith("best_")}
    return dict(scores), len(examples) - len(answered)
