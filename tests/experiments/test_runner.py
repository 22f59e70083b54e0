"""The plan of runs and the runner with a fake training: what is repeated, stored, refused and reported."""

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from benchmark_summary import LAST

from amos_fairseq.errors import UserError
from amos_fairseq.experiments import progress_display
from amos_fairseq.experiments import runner as runner_module
from amos_fairseq.experiments.benchmark import (
    LINEAR,
    Benchmark,
    BenchmarkTask,
    Stopped,
    common_notes,
    plan_runs,
    schedules_in_words,
    verdicts,
)
from amos_fairseq.experiments.progress_display import ProgressDisplay
from amos_fairseq.experiments.recipes import Hyperparameters, Recipe
from amos_fairseq.experiments.records import (
    Baselines,
    RunResult,
    TaskSummary,
    best_checkpoint,
    error_in_words,
    read_results,
    spread_of,
    standard_error,
)
from amos_fairseq.experiments.runner import RunFailed, Runner, find_baselines, run_benchmark
from amos_fairseq.experiments.session import PretrainedCheckpoint, Session

HYPERPARAMETERS = Hyperparameters(lr=1e-3, epochs=2, batch_size=16, warmup=0.1)
START = PretrainedCheckpoint(Path("start.pt"), "c" * 64, "amos", {"max_positions": 80, "encoder_embed_dim": 16}, {}, 7)
START = dataclasses.replace(START, from_scratch=True)  # no run reads the file


SCORES = {"seed1": 60.0, "seed2": 80.0, "seed3": 70.0, "seed4": 75.0}


class Toy(Benchmark):
    """A benchmark whose scores are given by seed."""

    name = trained_as = "toy"

    def __init__(self, out, devices=("cpu",), keep_checkpoints=False, scores=SCORES):
        recipe = Recipe("r", "a recipe", "base", {})
        self.session = Session(START, recipe, {}, (1, 2, 3), out, devices, "float32", keep_checkpoints)
        self.scores, self.evaluated = scores, []

    def train_flags(self, run):
        return ["DATA"]

    def fill_directory(self, run):
        (run.directory / "tokenizer").mkdir(exist_ok=True)

    def evaluate(self, task, checkpoint, device, stop):
        self.evaluated.append((checkpoint.parent.name, device))
        return {"score": self.scores[checkpoint.parent.name], "other": 1.0}


@pytest.fixture
def trainings(monkeypatch):
    """Record the calls of training, and write checkpoints instead of starting a process."""
    calls = []

    def train(command, directory, variables, stop, report, start):
        calls.append(directory.name)
        state = {"last_optimizer_state": {"m": torch.zeros(9)}, "model": {"w": torch.ones(2)}}
        state |= {"optimizer_history": [{"num_updates": 4}], "extra_state": {"previous_training_time": 2.5}}
        for name in ("best", "last"):
            torch.save(state, directory / f"checkpoint_{name}.pt")
        report(8, [])

    monkeypatch.setattr(runner_module, "train", train)
    return calls


def plan(out, seeds=(1, 2, 3), trials=(HYPERPARAMETERS,), **changed):
    task = BenchmarkTask("Toy", 64, "score", "d" * 64, trials, notes=("toy data",))
    return plan_runs(dataclasses.replace(Toy(out).session, seeds=seeds, **changed), [task])


def execute(out, *, seeds=(1, 2, 3), **changed):
    return Runner(Toy(out)).execute(plan(out, seeds, **changed))


def test_every_run_once_and_only_the_weights_of_the_best_are_stored(tmp_path, trainings):
    """A second call adds a seed and repeats none."""
    assert execute(tmp_path) == []
    assert trainings == ["seed1", "seed2", "seed3"]
    checkpoints = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt"))
    assert checkpoints == ["runs/Toy/seed2/checkpoint_best.pt"]
    state = torch.load(tmp_path / checkpoints[0], weights_only=True)
    assert state["last_optimizer_state"] is None
    assert torch.equal(state["model"]["w"], torch.ones(2))
    stored = json.loads((tmp_path / "runs/Toy/seed2/result.json").read_text())
    assert stored.keys() >= {"task", "trial", "seed", "scores", "identity"}, "the names of the file"
    origin = {"checkpoint_sha256", "precision", "from_scratch"}
    assert stored["identity"].keys() == origin | {"task", "seed", "settings", "data_sha256", "rows"}
    results = read_results(tmp_path)
    assert [(r.seed, r.main, r.scores["other"]) for r in results] == [(1, 60.0, 1.0), (2, 80.0, 1.0), (3, 70.0, 1.0)]
    # 64 rows in batches of 16 are four updates an epoch.
    assert [(r.epoch, r.seconds, r.notes) for r in results] == [(1.0, 2.5, ["toy data"])] * 3
    again = Toy(tmp_path)
    Runner(again).execute(plan(tmp_path, seeds=(1, 2, 3, 4)))
    assert trainings == ["seed1", "seed2", "seed3", "seed4"]
    assert [name for name, _ in again.evaluated] == ["seed4"]
    assert len(read_results(tmp_path)) == 4


def test_a_kill_leaves_a_checkpoint_that_the_result_names(tmp_path, trainings, monkeypatch):
    """At the moment when the weights alone would replace it; a result of another run is noticed before the next training."""

    def killed(source, target):
        if target.endswith(".pt"):
            raise KeyboardInterrupt
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(tmp_path, seeds=(1,))
    (result,) = read_results(tmp_path)
    file = best_checkpoint(tmp_path, result)
    assert torch.load(file, weights_only=True)["last_optimizer_state"] is not None
    execute(tmp_path, seeds=(1,))
    assert trainings == ["seed1"]
    shutil.copytree(tmp_path / "runs/Toy/seed1", tmp_path / "runs/Toy/seed2")
    with pytest.raises(UserError, match=r"seed2/result\.json is the result of runs/Toy/seed1"):
        execute(tmp_path, seeds=(1, 3))
    assert trainings == ["seed1"]


def test_checkpoints_are_stored_with_keep_checkpoints(tmp_path, trainings):
    Runner(Toy(tmp_path, keep_checkpoints=True)).execute(plan(tmp_path))
    assert len(list(tmp_path.rglob("*.pt"))) == 6
    state = torch.load(tmp_path / "runs/Toy/seed1/checkpoint_last.pt", weights_only=True)
    assert state["last_optimizer_state"] is not None
    execute(tmp_path, seeds=(1, 2, 3, 4))  # a later command without it leaves them
    assert len(list(tmp_path.rglob("*.pt"))) == 6


def test_directory_of_another_run_is_refused_before_training(tmp_path, trainings):
    execute(tmp_path, seeds=(2,))
    for changed, message in (
        ({"trials": (dataclasses.replace(HYPERPARAMETERS, lr=2e-3),)}, r"settings lr: 0.001 there, 0.002 here"),
        ({"checkpoint": dataclasses.replace(START, sha256="e" * 64)}, r"checkpoint_sha256: c{12}\.\.\. there, eeee"),
        ({"precision": "fp16"}, "precision: float32 there, fp16 here"),
    ):
        with pytest.raises(UserError, match=message):
            execute(tmp_path, **changed)
    assert trainings == ["seed2"]


def test_failures_are_reported_and_the_others_continue(tmp_path, trainings, monkeypatch):
    """Of a training, and of an evaluation, whose traceback is in the log."""
    good = runner_module.train

    def train(command, directory, *others):
        if directory.name == "seed1":
            raise RunFailed("it failed")
        good(command, directory, *others)

    monkeypatch.setattr(runner_module, "train", train)
    failures = Runner(Toy(tmp_path, scores={"seed1": 1.0, "seed3": 1.0})).execute(plan(tmp_path))
    assert [(one.run.seed, one.reason) for one in failures] == [(1, "it failed"), (2, "KeyError: 'seed2'")]
    assert failures[0].log == tmp_path / "runs/Toy/seed1/train.log"
    assert "Traceback" in failures[1].log.read_text()
    assert [result.seed for result in read_results(tmp_path)] == [3]


def test_stopped_runner_continues_later(tmp_path, trainings):
    benchmark = Toy(tmp_path)
    runner = Runner(benchmark)

    def stop_in_the_second(*arguments):
        if len(benchmark.evaluated) == 1:
            runner.stop.set()
            raise Stopped
        return Toy.evaluate(benchmark, *arguments)

    benchmark.evaluate = stop_in_the_second
    with pytest.raises(Stopped):
        runner.execute(plan(tmp_path))
    assert [result.seed for result in read_results(tmp_path)] == [1]
    execute(tmp_path)
    assert trainings == ["seed1", "seed2", "seed2", "seed3"]


def test_one_run_per_device_at_a_time(tmp_path, trainings, monkeypatch):
    together = threading.Barrier(2, timeout=60)
    good = runner_module.train

    def train(command, directory, *others):
        together.wait()  # breaks unless another run is here at the same time
        good(command, directory, *others)

    monkeypatch.setattr(runner_module, "train", train)
    monkeypatch.setattr(runner_module, "environment", lambda device, number: {})
    benchmark = Toy(tmp_path, devices=("cuda:0", "cuda:1"))
    assert Runner(benchmark).execute(plan(tmp_path, seeds=(1, 2, 3, 4))) == []
    assert sorted(device for _, device in benchmark.evaluated) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_trials_of_a_grid_have_directories_named_by_what_differs(tmp_path):
    more = [dataclasses.replace(HYPERPARAMETERS, **changed) for changed in ({"lr": 2e-3}, {"epochs": 3})]
    runs = plan(tmp_path, seeds=(1,), trials=(HYPERPARAMETERS, *more))
    assert [run.trial for run in runs] == ["lr0.001-epochs2", "lr0.002-epochs2", "lr0.001-epochs3"]
    assert len({run.directory for run in runs}) == 3
    (single,) = plan(tmp_path, seeds=(1,))
    assert (single.trial, single.directory) == ("", tmp_path / "runs/Toy/seed1")


def test_a_benchmark_of_the_interface_alone_gets_its_table(tmp_path, trainings):
    """With nothing but flags, scores and columns: a row for each task, the common notes, and the three files."""
    benchmark = Toy(tmp_path)
    benchmark.title, benchmark.columns = "Toys", {"absent": "Absent", "score": "Score", "other": "Other"}
    benchmark.tasks = {"Toy": plan(tmp_path)[0].task}
    benchmark.constants = lambda: {"Toy": Baselines(100, {"constant": {"score": 1.0}})}
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
    assert [path.name for path in outcome.files] == ["toy.md", "toy.csv", "toy.json"]
    assert json.loads((tmp_path / "toy.json").read_text())["tasks"]["Toy"]["scores"]["score"]["median"] == 70.0
    assert (tmp_path / "toy.setup.json").is_file()
    # Later calls keep the rows that they do not make; the linear model is fitted once.
    benchmark.session = dataclasses.replace(benchmark.session, baselines=("linear",))
    for fitted in (2.0, 3.0):
        benchmark.linear_scores = lambda stop, score=fitted: {"Toy": {"score": score}}
        outcome = run_benchmark(benchmark)
        assert outcome.table.rows == [*rows, ["Toy: linear model on frozen states", "2.0", "-"]]
    benchmark.constants, constants = dict, benchmark.constants
    assert len(run_benchmark(benchmark).table.rows) == 3
    # Of other data it is fitted again, or left out.
    benchmark.constants = constants
    for changed, asked, scores in (
        ({"data_sha256": "e" * 64}, ("linear",), {"constant": {"score": 1.0}, LINEAR: {"score": 3.0}}),
        ({"num_examples": 32}, (), {"constant": {"score": 1.0}}),
    ):
        benchmark.session = dataclasses.replace(benchmark.session, baselines=asked)
        benchmark.tasks = {"Toy": dataclasses.replace(plan(tmp_path)[0].task, **changed)}
        assert find_baselines(benchmark, threading.Event())["Toy"].scores == scores


NOT_ABOVE = "is not clearly above the row most"


@pytest.mark.parametrize(
    ("score", "seeds", "constant", "linear", "line"),
    [
        # n = 400: two standard errors are 200 sqrt(0.25 / 400) = 5, or 200 / 20 = 10 for a correlation
        ("accuracy", [54.9], 50.0, None, f"accuracy 54.9 {NOT_ABOVE} frequent class (50.0, and 5.0 for chance)"),
        ("accuracy", [55.1], 50.0, None, None),
        ("accuracy", [51.0, 69.0], 50.0, None, f"accuracy 60.0 {NOT_ABOVE}"),  # the deviation is 12.7
        ("matthews", [9.9], 0.0, None, f"matthews 9.9 {NOT_ABOVE}"),
        ("matthews", [10.1], 0.0, None, None),
        ("f1", [0.0], 0.0, None, f"f1 0.0 {NOT_ABOVE}"),
        ("f1", [0.1], 0.0, None, None),
        ("accuracy", [70.0], 50.0, 70.1, "accuracy 70.0 is below the linear model on frozen states (70.1)"),
        ("accuracy", [70.0], 50.0, 70.0, None),
        ("accuracy", [51.0], 50.0, 70.0, f"accuracy 51.0 {NOT_ABOVE}"),  # one line
    ],
)
def test_what_is_no_better_than_a_baseline_is_said(tmp_path, score, seeds, constant, linear, line):
    scores = {"most frequent class": {score: constant}} | ({} if linear is None else {LINEAR: {score: linear}})
    best = RunResult("Toy", "", 1, "runs/Toy/seed1", score, {score: seeds[0]}, *LAST)
    summary = TaskSummary("", 1, {score: spread_of(seeds)}, best)
    found = list(verdicts(Toy(tmp_path), {"Toy": summary}, {"Toy": Baselines(400, scores)}))
    assert len(found) == (line is not None)
    assert all(each.startswith(f"Toy: {line}") and each.endswith("or more rows to train on") for each in found)


def test_standard_error_of_a_score() -> None:
    """By hand: sqrt(0.75 * 0.25 / 1067), 1 / 20, 0.36 / 20; the last is a rounded 100."""
    rows = ("accuracy", 75.0, 1067), ("matthews", 0.0, 400), ("spearman", 80.0, 400), ("f1", 100.1, 10)
    assert [standard_error(*row) for row in rows] == pytest.approx([1.3256, 5.0, 1.8, 0.0], abs=1e-4)


def test_what_one_seed_and_a_small_dev_set_say(tmp_path):
    best = RunResult("Toy", "", 1, "runs/Toy/seed1", "accuracy", {"accuracy": 75.0}, *LAST)
    summary, toy = TaskSummary("", 1, {"accuracy": spread_of([75.0])}, best), Toy(tmp_path)
    for unit, at_least in (("rows", "about"), ("words", "at least")):
        toy.unit = unit
        notes = list(common_notes(toy, [best], {"Toy": summary}, {"Toy": Baselines(1067, {})}))
        assert notes[1] == "seeds: 1 per task; one seed does not tell how much another one differs"
        assert notes[2] == (
            f"Toy: dev has 1,067 {unit}; standard error of accuracy {at_least} 1.3: "
            "a difference of two models below twice that is weak evidence"
        )
    assert error_in_words("accuracy", 100.0, 20, "rows") == error_in_words("f1", 50.0, 20, "rows") == ""


def test_a_second_score_is_judged_too(tmp_path):
    """As UAS beside LAS: a parser that only knows relations is no better than a chain of words. One line, the first."""
    toy, chain = Toy(tmp_path), {"next": {"las": 4.3, "uas": 29.7}}
    toy.judged_too = ("uas",)
    not_above = "is not clearly above the row next"
    for las, uas, line in (
        (20.0, 29.0, f"uas 29.0 {not_above}"),
        (20.0, 36.0, None),
        (4.0, 9.0, f"las 4.0 {not_above}"),
    ):
        best = RunResult("Toy", "", 1, "runs/Toy/seed1", "las", {"las": las, "uas": uas}, *LAST)
        summary = TaskSummary("", 1, {"las": spread_of([las]), "uas": spread_of([uas])}, best)
        found = list(verdicts(toy, {"Toy": summary}, {"Toy": Baselines(25_147, chain)}))
        assert [each.startswith(f"Toy: {line}") for each in found] == [True] * (line is not None)


def test_lines_tell_epoch_loss_and_dev_scores(tmp_path, monkeypatch, capsys):
    """A line for each dev score, and every 30 seconds. Two epochs of four updates."""
    (run,), seconds = plan(tmp_path, seeds=(1,)), [1000.0]
    monkeypatch.setattr(progress_display, "monotonic", lambda: seconds[0])
    train = [{"split": "train", "update": update, "loss": loss} for update, loss in ((1, 0.75), (4, 0.6), (5, None))]
    dev = [{"split": "valid", "update": at, "loss": 0.5, "score": score} for at, score in ((4, 61.26), (8, 70.0))]
    display = ProgressDisplay(1, num_done=0)
    display.start(run)
    shown = (2, 1, train[:1]), (6, 5, [train[1], dev[0]]), (35, 5, []), (36, 5, train[2:]), (37, 8, dev[1:])
    for second, update, records in shown:
        seconds[0] = 1000.0 + second
        display.advance(run, update, records)
    display.evaluating(run)
    display.finish(run, "score 70.0")
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("Toy seed 1: 2 epochs, 8 updates", "Toy seed 1: score 70.0 (1 of 1 runs)")
    expected = (
        ("epoch 1 of 2", " 5/8 ", "loss 0.600, dev score 61.3"),
        ("epoch 2 of 2", " 5/8 ", "loss is not finite, dev score 61.3"),
        ("epoch 2 of 2", " 8/8 ", "loss is not finite, dev score 70.0"),
    )
    for line, parts in zip(lines, expected, strict=True):
        assert all(part in line for part in ("Toy seed 1, ", *parts)), line
