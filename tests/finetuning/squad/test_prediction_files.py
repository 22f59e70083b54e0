"""Predictions of a split with given scores: files, threshold and reported scores."""

import json
from pathlib import Path

import pytest
from synthetic_squad import make_squad, prepare_squad, without_impossible

from amos_fairseq.data.squad import SquadSplit
from amos_fairseq.finetuning.squad.benchmark import write_predictions
from amos_fairseq.finetuning.squad.decoding import Decoded, ScoredText
from amos_fairseq.finetuning.squad.official import evaluate, read_null_odds, read_predictions, read_squad


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> SquadSplit:
    """40 questions, 10 of them without an answer."""
    return SquadSplit(prepare_squad(tmp_path_factory.mktemp("squad"), make_squad()), "valid")


def right_answers(split: SquadSplit, odds: dict[bool, float]) -> dict[str, Decoded]:
    """The right answer, or a wrong one where there is none; odds by ``is_impossible``, a little different each."""
    return {
        example.id: Decoded(
            [ScoredText(example.answers[0].text if example.answers else "wrong", 1.0), ScoredText("other", 0.5)],
            odds[example.is_impossible] + number / 1000,
        )
        for number, example in enumerate(split.examples)
    }


def read(directory: Path, name: str) -> dict:
    return json.loads((directory / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("odds", [{False: -5.0, True: 3.0}, {False: 2.0, True: 9.0}, {False: -9.0, True: -4.0}])
def test_threshold_separates_answerable_questions(split, tmp_path, odds):
    """On any scale of the odds: all answers right, the threshold is that of the last answerable question."""
    decoded = right_answers(split, odds)
    scores = write_predictions(tmp_path, split, decoded)
    assert scores["em"] == scores["f1"] == scores["best_em"] == scores["has_ans_f1"] == scores["no_ans_em"] == 100
    answerable = [decoded[example.id].null_odds for example in split.examples if example.answers]
    assert scores["null_threshold"] == max(answerable)
    predictions = read(tmp_path, "predictions.json")
    assert all((predictions[example.id] == "") == example.is_impossible for example in split.examples)
    assert read(tmp_path, "scores.json") == scores
    assert all(type(value) is float for value in scores.values())


@pytest.mark.parametrize("odds", [{False: 3.0, True: -5.0}, {False: -3.0, True: -5.0}])
def test_no_answer_is_best(split, tmp_path, odds):
    """Every answer is wrong: none is given, also where the odds are below 0, which the search uses for that."""
    decoded = {name: Decoded([ScoredText("wrong", 1.0)], d.null_odds) for name, d in right_answers(split, odds).items()}
    scores = write_predictions(tmp_path, split, decoded)
    assert set(read(tmp_path, "predictions.json").values()) == {""}
    assert (scores["em"], scores["no_ans_em"], scores["has_ans_em"]) == (25, 100, 0)


def test_files_are_what_the_official_script_reads(split, tmp_path):
    """With odds that separate badly, the scores are between the extremes, and equal those of the files."""
    decoded = right_answers(split, {False: -1.0, True: -0.98})
    scores = write_predictions(tmp_path, split, decoded)
    questions = list(read_squad(split.directory.parent / "squad.json").questions())
    predictions, odds = read_predictions(tmp_path / "predictions.json"), read_null_odds(tmp_path / "null_odds.json")
    official, missing = evaluate(questions, predictions)
    assert (official["exact"], official["f1"], missing) == (scores["em"], scores["f1"], 0)
    assert 25 < scores["em"] < 100
    assert odds == {name: d.null_odds for name, d in decoded.items()}
    n_best = read(tmp_path, "nbest_predictions.json")
    assert [entry["text"] for entry in n_best["p0q0"]] == [decoded["p0q0"].best, "other"]


def test_version_one_has_no_threshold(tmp_path):
    split = SquadSplit(prepare_squad(tmp_path, without_impossible(make_squad())), "valid")
    scores = write_predictions(tmp_path, split, right_answers(split, {False: 100.0, True: 100.0}))
    assert scores == {"em": 100.0, "f1": 100.0}
    assert not (tmp_path / "null_odds.json").exists()
