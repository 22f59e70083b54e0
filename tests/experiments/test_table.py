"""The table of a benchmark, its notes, and what a second command finds in OUT."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
from benchmark_summary import make_result
from toy_benchmark import HYPERPARAMETERS, Toy

from amos_fairseq.errors import EXIT_CODES, UserError
from amos_fairseq.experiments import runner as runner_module
from amos_fairseq.experiments.benchmark import Stopped
from amos_fairseq.experiments.records import ConstantScores, summarize
from amos_fairseq.experiments.table import (
    common_notes,
    error_in_words,
    ratio_error,
    run_and_print,
    run_benchmark,
    schedules_in_words,
)
from amos_fairseq.files import take_lock


@pytest.fixture
def toy(tmp_path, trainings):
    def benchmark(**changed):
        toy = Toy(tmp_path, **changed)
        toy.title, toy.columns = "Toys", {"absent": "Absent", "score": "Score", "other": "Other"}
        toy.constants = lambda: {"Toy": ConstantScores(100, {"constant": {"score": 1.0}})}
        return toy

    return benchmark


def test_a_benchmark_of_the_interface_alone_gets_its_table(toy, tmp_path):
    """With nothing but flags, scores and columns: a row for each task, the common notes, and the three files."""
    benchmark = toy()
    (schedule,) = schedules_in_words(benchmark)
    assert schedule == "Toy: learning rate 0.001, 64 examples in batches of 16, 2 epochs, 8 updates"
    outcome = run_benchmark(benchmark)
    assert outcome.table.title == "Toys: median ± standard deviation over seeds"
    assert outcome.table.columns == ["", "Score", "Other"]
    rows = [["Toy: amos (random weights)", "70.0 ± 10.0", "1.0 ± 0.0"], ["Toy: constant", "1.0", "-"]]
    assert outcome.table.rows == rows
    assert outcome.table.notes == [
        "fine-tuning settings: recipe r (a recipe; values for base models)",
        "seeds: 3 per task; standard deviations divide by n - 1",
        "Toy: dev has 100 rows",
        "random weights: only the architecture of the checkpoint, none of its weights",
        "each run is scored at its best epoch on the same dev set",
        "toy data",
    ]
    assert [path.name for path in outcome.files] == ["toy.md", "toy.json"]
    assert json.loads((tmp_path / "toy.json").read_text())["tasks"]["Toy"]["scores"]["score"]["median"] == 70.0


@pytest.mark.parametrize("number", EXIT_CODES)
def test_a_signal_ends_the_command_with_its_code(number, tmp_path, monkeypatch, capsys):
    def train(command, directory, variables, stop, report):
        os.kill(os.getpid(), number)
        assert stop.wait(60)
        raise Stopped

    monkeypatch.setattr(runner_module, "train", train)
    if signal.getsignal(number) == signal.SIG_IGN:  # the tests may run under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        run_and_print(Toy(tmp_path))
    assert ended.value.code == (130 if number == signal.SIGINT else 75)
    assert "the same command continues" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_one_command_at_a_time_in_a_folder(tmp_path, trainings):
    with take_lock(tmp_path / ".lock", "", ""), pytest.raises(UserError, match=r"in use by another command \(process"):
        run_and_print(Toy(tmp_path))
    assert trainings == []


def test_a_table_has_the_results_of_the_last_command_and_counts_the_others(toy, tmp_path):
    run_benchmark(toy())
    other = toy(seeds=(1, 2), trials=(dataclasses.replace(HYPERPARAMETERS, lr=2e-3),))
    outcome = run_benchmark(other)
    assert outcome.table.rows[0][1] == "70.0 ± 14.1"
    assert outcome.table.notes[-1] == f"{tmp_path} also holds 3 results of other settings or tasks"
    assert [run["seed"] for run in json.loads((tmp_path / "toy.json").read_text())["runs"]] == [1, 2]


def test_what_one_seed_and_a_small_dev_set_say(tmp_path):
    """The standard error by hand: sqrt(0.75 * 0.25 / 1067)."""
    best, toy = make_result("Toy", 1, "accuracy", {"accuracy": 75.0}), Toy(tmp_path)
    for unit, at_least in (("rows", "about"), ("words", "at least")):
        toy.unit = unit
        notes = list(common_notes(toy, [best], summarize([best]), {"Toy": ConstantScores(1067, {})}))
        assert notes[1] == "seeds: 1 per task; one seed cannot rank models: --seeds 5 shows how much seeds differ"
        assert notes[2] == (
            f"Toy: dev has 1,067 {unit}; standard error of accuracy {at_least} 1.3: "
            "a difference of two models below twice that is weak evidence"
        )
    for constant, is_as_good in ((75.0, True), (74.9, False)):
        constants = {"Toy": ConstantScores(9, {"most frequent class": {"accuracy": constant}})}
        notes = common_notes(toy, [best], summarize([best]), constants)
        assert any('no score on dev is above that of "most frequent class"' in note for note in notes) == is_as_good
    linear = make_result("Toy", 1, "accuracy", {"accuracy": 99.0, "accuracy_error": 20.0}, "linear")
    notes = common_notes(toy, [best], summarize([best, linear]), {})
    assert any("the trained model is kept: the linear one is not better" in note for note in notes)


def test_standard_error_of_a_score() -> None:
    """By hand: 1 / 20, 0.36 / 20, and sqrt(22 / 24 x 2 / 24 / 24)."""
    for score, value, num_scored, error in (
        ("matthews", 0.0, 400, "about 5.0"),
        ("spearman", 80.0, 400, "about 1.8"),
        ("accuracy", 100.0, 20, "about 5.6"),
    ):
        assert error_in_words(score, {score: value}, num_scored, "rows") == f"; standard error of {score} {error}"
    assert error_in_words("f1", {"f1": 50.0}, 20, "rows") == ""
    given = error_in_words("f1", {"f1": 50.0, "f1_error": 2.51}, 20, "words")
    assert given == "; standard error of f1 about 2.5"


def test_standard_error_of_a_ratio_is_that_of_a_bootstrap() -> None:
    """2,000 samples of 300 sentences; their deviation is known to 1.6 %."""
    draw = np.random.default_rng(1)
    wholes = draw.integers(0, 9, 300)
    parts = 2 * draw.binomial(wholes // 2, 0.7)
    samples = draw.integers(0, 300, (2000, 300))
    ratios = parts[samples].sum(1) / wholes[samples].sum(1)
    assert ratio_error(parts, wholes) == pytest.approx(100 * ratios.std(), rel=0.06)
    assert ratio_error([0, 0], [0, 0]) == ratio_error([1], [2]) == 0
