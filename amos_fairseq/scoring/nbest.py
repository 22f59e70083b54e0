"""Files of n-best lists: what a recogniser or translator proposes for each utterance, and what was really said.

{"utterance-1": {"reference": "what was said",
                 "hypotheses": [{"text": "what was set", "score": -3.2}, {"text": "what was said", "score": -3.5}]}}

``score`` is f(x | s), the log-probability (or any score that is larger for better) that the recogniser gives to the text.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.scoring.word_errors import WordErrors


@dataclass(frozen=True)
class Hypothesis:
    text: str
    score: float
    word_errors: WordErrors


@dataclass(frozen=True)
class Utterance:
    """One n-best list, in the order of the file; not empty."""

    id: str
    reference: str
    hypotheses: list[Hypothesis]


def read_nbest(path: Path) -> list[Utterance]:
    """All lists of a file, in its order.

    Raises:
        UserError: the file cannot be read or has another form, a list is empty, a score is no number, or the references have
            no word, so that no error rate exists.
    """
    content = _read_json(path)
    if not isinstance(content, dict) or not content:
        raise UserError(
            f'{path}: expected an object {{"id": {{"reference": ..., "hypotheses": [...]}}, ...}} of utterances'
        )
    utterances = [_utterance(path, id_, entry) for id_, entry in content.items()]
    if not any(utterance.reference.split() for utterance in utterances):
        raise UserError(f"{path}: all references are empty, there is no word error rate: give what was said")
    return utterances


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise UserError(f"{path}: the n-best lists cannot be read ({error.strerror})") from error
    except ValueError as error:  # of UTF-8, of JSON, or of ours
        raise UserError(f"{path}: no JSON of n-best lists ({error})") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An id that stands twice would replace its first list in silence."""
    key, count = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 1)
    if count > 1:
        raise ValueError(f"{key!r} stands {count} times in one object")
    return dict(pairs)


def _utterance(path: Path, id_: str, entry: Any) -> Utterance:
    reference = entry.get("reference") if isinstance(entry, dict) else None
    if not isinstance(reference, str):
        raise UserError(f"{path}: utterance {id_!r} needs a text 'reference'")
    hypotheses = entry.get("hypotheses")
    if not isinstance(hypotheses, list) or not hypotheses:
        raise UserError(f"{path}: utterance {id_!r} needs a list 'hypotheses' of one or more")
    return Utterance(
        id_, reference, [_hypothesis(path, id_, reference, *each) for each in enumerate(hypotheses, start=1)]
    )


def _hypothesis(path: Path, id_: str, reference: str, number: int, entry: Any) -> Hypothesis:
    text, score = (entry.get("text"), entry.get("score")) if isinstance(entry, dict) else (None, None)
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool) and math.isfinite(score)
    if not isinstance(text, str) or not is_number:
        raise UserError(f"{path}: hypothesis {number} of {id_!r} needs a 'text' and a finite number 'score'")
    return Hypothesis(text, float(score), WordErrors.of(reference, text))
