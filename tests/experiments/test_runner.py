"""The plan of runs and the runner with a fake training: what is repeated, stored and reported."""

import dataclasses
import json
import os
import threading

import pytest
import torch
from toy_benchmark import HYPERPARAMETERS, START, Toy

from amos_fairseq.experiments import runner as runner_module
from amos_fairseq.experiments.benchmark import RunFailed, Stopped
from amos_fairseq.experiments.runner import Runner, RunProgress
from tests.helpers.benchmark_summary import read_results


def execute(out, **changed) -> Runner:
    benchmark = Toy(out, **changed)
    runner = Runner(benchmark)
    runner.execute(benchmark.plan())
    return runner


def test_every_run_once_and_only_the_weights_of_the_best_are_stored(tmp_path, trainings):
    """A second call adds a seed and repeats none."""
    runner = execute(tmp_path)
    assert runner.failures == []
    assert trainings == ["seed1", "seed2", "seed3"]
    checkpoints = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt"))
    identity = runner.runs[0].directory.parent.name
    assert checkpoints == [f"runs/Toy/{identity}/seed2/checkpoint_best.pt"]
    state = torch.load(tmp_path / checkpoints[0], weights_only=True)
    assert state["last_optimizer_state"] is None
    assert torch.equal(state["model"]["w"], torch.ones(2))
    stored = json.loads((tmp_path / f"runs/Toy/{identity}/seed2/result.json").read_text())
    assert stored.keys() >= {"task", "trial", "seed", "scores", "settings"}, "the names of the file"
    assert (stored["identity"], stored["settings"]["checkpoint_sha256"]) == (identity, START.sha256)
    results = read_results(tmp_path)
    assert [(r.seed, r.main, r.scores["other"]) for r in results] == [(1, 60.0, 1.0), (2, 80.0, 1.0), (3, 70.0, 1.0)]
    # 64 rows in batches of 16 are four updates an epoch.
    assert [(r.epoch, r.seconds, r.notes) for r in results] == [(1.0, 2.5, ["toy data"])] * 3
    again = execute(tmp_path, seeds=(1, 2, 3, 4))
    assert trainings == ["seed1", "seed2", "seed3", "seed4"]
    assert [name for name, _ in again.benchmark.evaluated] == ["seed4"]
    assert len(read_results(tmp_path)) == 4
    fewer = Runner(Toy(tmp_path, seeds=(1,)))
    assert len(fewer.results(fewer.benchmark.plan())) == 4, "the table has all seeds of these settings"


def test_a_kill_leaves_a_checkpoint_that_the_result_names(tmp_path, trainings, monkeypatch):
    """At the moment when the weights alone would replace it."""

    def killed(source, target):
        if target.endswith(".pt"):
            raise KeyboardInterrupt
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(tmp_path, seeds=(1,))
    (result,) = read_results(tmp_path)
    file = tmp_path / result.directory / result.checkpoint
    assert torch.load(file, weights_only=True)["last_optimizer_state"] is not None
    execute(tmp_path, seeds=(1,))
    assert trainings == ["seed1"]


def test_checkpoints_are_stored_with_keep_checkpoints(tmp_path, trainings):
    execute(tmp_path, keep_checkpoints=True)
    assert len(list(tmp_path.rglob("*.pt"))) == 6
    state = torch.load(next(tmp_path.rglob("seed1/checkpoint_last.pt")), weights_only=True)
    assert state["last_optimizer_state"] is not None
    execute(tmp_path, seeds=(1, 2, 3, 4))  # a later command without it leaves them
    assert len(list(tmp_path.rglob("*.pt"))) == 6


def test_other_settings_get_directories_beside_those_of_earlier_commands(tmp_path, trainings):
    """Hyperparameters, checkpoint, precision and data; each command has its own results, and its own best weights."""
    commands = [{}, {"trials": (dataclasses.replace(HYPERPARAMETERS, lr=2e-3),)}, {"precision": "fp16"}]
    commands.append({"checkpoint": dataclasses.replace(START, sha256="e" * 64)})
    runners = [execute(tmp_path, seeds=(1, 2), **changed) for changed in commands]
    other_data = Toy(tmp_path, seeds=(1, 2))
    other_data.tasks["Toy"] = dataclasses.replace(other_data.tasks["Toy"], data_sha256="f" * 64)
    runners.append(Runner(other_data))
    runners[-1].execute(other_data.plan())
    assert trainings == ["seed1", "seed2"] * 5
    for runner in runners:
        assert [result.seed for result in runner.results(runner.runs)] == [1, 2]
        assert runner.runs[1].directory.joinpath("checkpoint_best.pt").is_file()
    assert len(list(tmp_path.rglob("*.pt"))) == 5
    # The trials of a grid are named among themselves, also one that a single command has trained.
    grid = execute(tmp_path, seeds=(1,), trials=(HYPERPARAMETERS, dataclasses.replace(HYPERPARAMETERS, lr=2e-3)))
    assert [result.trial for result in grid.results(grid.runs)] == ["lr0.001", "lr0.001", "lr0.002", "lr0.002"]
    assert len(trainings) == 10


def test_failures_are_reported_and_the_others_continue(tmp_path, trainings, monkeypatch):
    """Of a training, and of an evaluation, whose traceback is in the log."""
    good = runner_module.train

    def train(command, directory, *others):
        if directory.name == "seed1":
            raise RunFailed("it failed")
        good(command, directory, *others)

    monkeypatch.setattr(runner_module, "train", train)
    failures = execute(tmp_path, scores={"seed1": 1.0, "seed3": 1.0}).failures
    assert [(one.run.seed, one.reason) for one in failures] == [(1, "it failed"), (2, "KeyError: 'seed2'")]
    assert failures[0].log == failures[0].run.directory / "train.log"
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
        runner.execute(benchmark.plan())
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
    runner = execute(tmp_path, devices=("cuda:0", "cuda:1"), seeds=(1, 2, 3, 4))
    assert runner.failures == []
    assert sorted(device for _, device in runner.benchmark.evaluated) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_trials_of_a_grid_are_named_by_what_differs(tmp_path):
    more = [dataclasses.replace(HYPERPARAMETERS, **changed) for changed in ({"lr": 2e-3}, {"epochs": 3})]
    runs = Toy(tmp_path, seeds=(1,), trials=(HYPERPARAMETERS, *more)).plan()
    assert [run.trial for run in runs] == ["lr0.001-epochs2", "lr0.002-epochs2", "lr0.001-epochs3"]
    assert len({run.directory for run in runs}) == 3
    (single,) = Toy(tmp_path, seeds=(1,)).plan()
    assert (single.trial, single.directory) == ("", runs[0].directory)


def test_lines_tell_epoch_loss_and_dev_scores(tmp_path, monkeypatch, capsys):
    """A line for each dev score, and every 30 seconds. Two epochs of four updates."""
    (run,), seconds = Toy(tmp_path, seeds=(1,)).plan(), [1000.0]
    monkeypatch.setattr(runner_module, "monotonic", lambda: seconds[0])
    train = [{"split": "train", "update": update, "loss": loss} for update, loss in ((1, 0.75), (4, 0.6), (5, None))]
    dev = [{"split": "valid", "update": at, "loss": 0.5, "score": score} for at, score in ((4, 61.26), (8, 70.0))]
    estimates = []
    progress = RunProgress(run, estimates.append)
    shown = (2, 1, train[:1]), (6, 5, [train[1], dev[0]]), (35, 5, []), (36, 5, train[2:]), (37, 8, dev[1:])
    for second, update, records in shown:
        seconds[0] = 1000.0 + second
        progress.advance(update, records)
    assert estimates == [33 / 4]  # the first look five seconds after that at update 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "Toy seed 1: 2 epochs, 8 updates"
    expected = (
        ("epoch 1 of 2", " 5/8 ", "loss 0.600, dev score 61.3"),
        ("epoch 2 of 2", " 5/8 ", "loss is not finite, dev score 61.3"),
        ("epoch 2 of 2", " 8/8 ", "loss is not finite, dev score 70.0"),
    )
    for line, parts in zip(lines, expected, strict=True):
        assert all(part in line for part in ("Toy seed 1, ", *parts)), line
