"""What is left of a decoded split: predictions in the official format, the n best, null odds, and their scores."""

import json
from pathlib import Path
from typing import Any, Dict, List

from amos_fairseq.data.squad import SquadSplit
from amos_fairseq.files import whole_file
from amos_fairseq.squad.decoding import Decoded
from amos_fairseq.squad.metrics import evaluate
from amos_fairseq.squad.official_files import Answer, Question

PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"
SCORES = "scores.json"


def official_questions(split: SquadSplit) -> List[Question]:
    """The questions of a split with all their answers, as evaluation compares with; their texts are left out."""
    return [
        Question(example.id, "", tuple(Answer(a.text, a.start) for a in example.answers), example.is_impossible)
        for example in split.examples
    ]


def write_predictions(directory: Path, split: SquadSplit, decoded: Dict[str, Decoded]) -> Dict[str, Any]:
    """Score the answers and write all files into ``directory``.

    Where the split has questions without an answer, the threshold of the null odds is chosen on it: the one that the
    official script finds to give the best F1, on the scale of ``null_odds.json``. What is above it is predicted as "".

    Returns:
        ``em`` and ``f1`` of ``predictions.json``; with unanswerable questions also ``has_ans_em``, ``has_ans_f1``,
        ``no_ans_em``, and ``best_em``, the highest over all thresholds; ``null_threshold``. The same is written to
        ``scores.json``.
    """
    questions = official_questions(split)
    answers = {name: found.best for name, found in decoded.items()}
    scores: Dict[str, Any] = {}
    if any(question.is_impossible for question in questions):
        odds = {name: found.null_odds for name, found in decoded.items()}
        best, _ = evaluate(questions, answers, odds)
        threshold = best["best_f1_thresh"]
        if threshold not in odds.values():
            # The search begins with "no answer to anything" and calls that 0, which means it for probabilities only.
            threshold = min(odds.values()) - 1
        scores = {"best_em": best["best_exact"], "null_threshold": threshold}
        answers = {name: "" if odds[name] > threshold else text for name, text in answers.items()}
        _write(directory / NULL_ODDS, odds)
    official, _ = evaluate(questions, answers)
    scores = {"em": official["exact"], "f1": official["f1"]} | scores
    if any(question.is_impossible for question in questions):
        scores |= {"has_ans_em": official.get("HasAns_exact", 0.0), "has_ans_f1": official.get("HasAns_f1", 0.0)}
        scores["no_ans_em"] = official["NoAns_exact"]
    scores = {name: float(value) for name, value in scores.items()}
    _write(directory / PREDICTIONS, answers)
    _write(directory / N_BEST, {name: found.as_json() for name, found in decoded.items()})
    _write(directory / SCORES, scores)
    return scores


def _write(path: Path, content: Any) -> None:
    with whole_file(str(path)) as unfinished:
        Path(unfinished).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
