"""``amos squad`` end to end: a small model memorizes a synthetic SQuAD."""

import json

import pytest
from fine_tuning_tasks import fine_tune
from synthetic_squad import make_squad, prepare_squad, untrained_checkpoint
from tiny_runs import run_of

from amos_fairseq.inputs.question_files import evaluate, read_squad

pytestmark = pytest.mark.slow

# About 15 seconds on one core.
RECIPE = """\
defaults:
  {lr: 3.0e-3, epochs: 25, batch_size: 8, warmup: 0.1, dropout: 0, attention_dropout: 0, pooler_dropout: 0.1,
   num_separators: 2, checkpoint: last}
tasks: {SQuAD: {}}
"""


def test_a_synthetic_squad_is_memorized(tmp_path):
    """Training and dev questions are the same 40: EM is high only where alignment, windows, labels, masks and decoding
    agree. Contexts are longer than a window, answers hold accents, ligatures, symbols and spaces.
    """
    place = tmp_path
    untrained_checkpoint(place / "start", prepare_squad(place, make_squad()))
    (place / "recipe.yaml").write_text(RECIPE)
    out, source = place / "out", place / "squad.json"
    assert "SQuAD2.0" in fine_tune("squad", place, out, "--train", source, "--dev", source, "--span-head", "joint")
    run = run_of(out, "SQuAD2.0")
    scores = json.loads((run / "scores.json").read_text())
    # Seen: 100. Always "" would give 25, the most frequent colour about 40.
    assert scores["em"] >= 90
    assert scores["f1"] >= 90
    summary = json.loads((out / "squad.json").read_text())
    assert summary["tasks"]["SQuAD2.0"]["scores"]["em"]["median"] == scores["em"]
    assert "| SQuAD2.0" in (out / "squad.md").read_text()
    predictions = json.loads((run / "predictions.json").read_text())
    assert len(predictions) == 40
    # The files hold the answers that were scored.
    questions = read_squad(place / "squad.json").questions
    golds = {asked.id: [answer.text for answer in asked.answers] for asked in questions}
    again = evaluate(golds, predictions)
    assert (again["exact"], again["f1"]) == (scores["em"], pytest.approx(scores["f1"]))
    odds = json.loads((run / "null_odds.json").read_text())
    assert evaluate(golds, predictions, odds)["best_f1"] == pytest.approx(scores["f1"])
