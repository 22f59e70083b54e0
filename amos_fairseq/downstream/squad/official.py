"""SQuAD's official scores of prediction files, which are validated while they are read.

Exact match and F1 are those of the official scripts (Rajpurkar et al., 2016, section 6.1, and 2018, section 5), and of MLQA's
for Chinese where contexts have no spaces.
"""

import argparse
import json
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from amos_fairseq.downstream.squad.question_files import read_json_file, read_squad
from amos_fairseq.errors import UserError
from amos_fairseq.strangers import finite_number
from amos_fairseq.text import UNSPACED

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def task_name(has_impossible: bool) -> str:
    """Return the name of a version in tables and folders: 2.0 has questions without an answer in its dev set."""
    return "SQuAD2.0" if has_impossible else "SQuAD1.1"


def read_predictions(path: Path) -> dict[str, str]:
    hint = "it holds no predictions, expected one JSON object of question ids and answer texts"
    content = read_json_file(path, hint)
    if not all(isinstance(text, str) for text in content.values()):
        raise UserError(f"{path} has values that are no texts: {hint}")
    return content


def read_null_odds(path: Path) -> dict[str, float]:
    hint = "it holds no null odds, expected one JSON object of question ids and numbers"
    try:
        return {name: finite_number(odds) for name, odds in read_json_file(path, hint).items()}
    except ValueError as error:
        raise UserError(f"{path}: {error}: {hint}") from error


def words_of(text: str) -> list[str]:
    """Return the words between spaces, in lower case, without ASCII punctuation and articles: SQuAD's rule."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def characters_of(text: str) -> list[str]:
    """Return each character of a script without spaces, and the words between them, in lower case, without punctuation.

    This is the rule of MLQA's script for Chinese (Lewis et al., 2020, "mixed segmentation"), here for all such scripts.
    """
    text = text.lower().translate(_PUNCTUATION)
    kept = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return UNSPACED.sub(r" \g<0> ", kept).split()


UNITS_OF = {"words": words_of, "characters": characters_of}
OF_CHARACTERS = "EM and F1 compare characters, as MLQA's script does for Chinese (--score-by words compares words)"


def fitting_units(contexts: Iterable[str]) -> str:
    """Return ``characters`` if most letters of the contexts are of a script without spaces, else ``words``."""
    letters = Counter(character for text in contexts for character in text if character.isalpha())
    unspaced = sum(count for character, count in letters.items() if UNSPACED.match(character))
    return "characters" if 2 * unspaced > letters.total() else "words"


def f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the words or characters of both, with multiplicity.

    If one of them is empty, the score is 1.0 if both are, otherwise 0.0.
    """
    if not gold or not predicted:
        return float(gold == predicted)
    common = sum((Counter(gold) & Counter(predicted)).values())
    return 2 * common / (len(gold) + len(predicted))


def evaluate(
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float = float("inf"),
    units: str = "words",
) -> dict[str, float]:
    """Score one prediction file as the official script of 2.0: questions without a prediction do not count.

    Args:
        answers: by question, the texts that are right; none where there is no answer.
        null_odds: for each question, how likely it has no answer, on any scale; enables the search for the best thresholds.
        null_threshold: a question with odds above it counts as not answered, whatever its prediction. The official
            script's default, 1.0, is meant for probabilities; this default uses all predictions as they are.
        units: a key of :data:`UNITS_OF`: what is compared.
    """
    predicted = [name for name in answers if name in predictions]
    if not predicted:
        raise UserError("no question of the data set has a prediction: do both files belong together?")
    if null_odds is not None and (without := [name for name in predicted if name not in null_odds]):
        raise UserError(f"the question {without[0]!r:.60} has no null odds: give the file of the same run")
    split = UNITS_OF[units]
    raw: dict[str, dict[str, float]] = {"exact": {}, "f1": {}}
    for name in predicted:
        # Answers with at least one word are right, or the empty text if there is none.
        golds, found = [gold for gold in map(split, answers[name]) if gold] or [[]], split(predictions[name])
        raw["exact"][name] = float(found in golds)
        raw["f1"][name] = max(f1(gold, found) for gold in golds)
    # Questions that count as not answered, whatever their prediction.
    unanswered = {name for name in predicted if null_odds is not None and null_odds[name] > null_threshold}
    groups = {
        "": predicted,
        "HasAns_": [name for name in predicted if answers[name]],
        "NoAns_": [name for name in predicted if not answers[name]],
    }
    scores: dict[str, float] = {}
    for prefix, names in groups.items():
        if not names:
            continue
        for measure, by_name in raw.items():
            counted = (float(not answers[name]) if name in unanswered else by_name[name] for name in names)
            scores[f"{prefix}{measure}"] = 100.0 * sum(counted) / len(names)
        scores[f"{prefix}total"] = len(names)
    if null_odds is not None:
        for measure, by_name in raw.items():
            best, threshold = best_threshold(by_name, answers, predictions, null_odds)
            scores |= {f"best_{measure}": best, f"best_{measure}_thresh": threshold}
    return scores


def best_threshold(
    scores: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> tuple[float, float]:
    """Return the largest mean score in percent, and the threshold of the null odds that gives it.

    The search starts with no question answered and answers one question after another, from the lowest odds on. Each
    answer adds its score, or subtracts the point of a question that is correctly left without an answer.
    """
    current = best = float(sum(not answers[name] for name in scores))
    threshold = 0.0
    for name in sorted(null_odds, key=lambda name: null_odds[name]):
        if name not in scores:
            continue
        if answers[name]:
            current += scores[name]
        elif predictions[name]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[name]
    return 100.0 * best / len(scores), threshold


def print_scores(arguments: argparse.Namespace) -> None:
    """Print the scores of ``amos squad --evaluate`` as JSON on stdout, in the format of the official script."""
    odds = None if arguments.null_odds is None else read_null_odds(arguments.null_odds)
    if odds is None and arguments.null_threshold is not None:
        raise UserError("--null-threshold needs --null-odds: without them there is nothing to compare")
    predictions_file, dataset = arguments.evaluate
    data = read_squad(dataset)
    answers = {asked.id: [answer.text for answer in asked.answers] for asked in data.questions}
    predictions = read_predictions(predictions_file)
    threshold = float("inf") if arguments.null_threshold is None else arguments.null_threshold
    units = arguments.score_by or fitting_units(paragraph.context for paragraph in data.paragraphs)
    scores = evaluate(answers, predictions, odds, threshold, units)
    if missing := len(answers.keys() - predictions.keys()):
        notice = (
            f"{missing} of {len(answers)} questions have no prediction and are not part of any score (as in the official "
            "script of SQuAD 2.0; the script of 1.1 counts them as wrong)"
        )
        print(notice, file=sys.stderr)
    notes = data.notes if units == "words" else (*data.notes, OF_CHARACTERS)
    for note in notes:
        print(f"{dataset}: {note}", file=sys.stderr)
    print(json.dumps(scores, indent=2))
