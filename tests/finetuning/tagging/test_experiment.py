"""``amos tag`` before and after the training: what it refuses, and the table of results that were not trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_tagging import prepare_tagging

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Task
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint
from amos_fairseq.finetuning.recipes import load_recipe
from amos_fairseq.finetuning.runner import Runner
from amos_fairseq.finetuning.runs import Result, write_result
from amos_fairseq.finetuning.session import Session
from amos_fairseq.finetuning.tagging import experiment
from amos_fairseq.finetuning.tagging.benchmark import Tagging


class PreparedData:
    name, task = "tagging", "tagging-upos"
    tasks = {task: Task(task, num_examples=100, main_score="accuracy", data_sha256="")}

    def __init__(self, *_, **__):
        pass


def execute(self, runs):
    """Every run scores 100 times its warm-up."""
    for run in runs:
        run.directory.mkdir(parents=True)
        scores = {"accuracy": 100 * run.hyperparameters.warmup}
        directory = str(run.directory.relative_to(self.out))
        result = Result(
            run.task.name, run.trial, 1, directory, "accuracy", scores, "checkpoint_best.pt", 1, 1, None, run.identity
        )
        write_result(self.out, result)
    return []


def test_notes_of_a_grid_name_the_column(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "Tagging", PreparedData)
    monkeypatch.setattr(Runner, "execute", execute)
    checkpoint = PretrainedCheckpoint(Path("checkpoint_last.pt"), "", "amos_tiny", {}, {}, num_updates=10)
    overrides = {"lr": 1e-5, "epochs": 2, "batch_size": 16}
    recipe = load_recipe("amos_grid", "small", overrides)
    session = Session(checkpoint, recipe, overrides, (1,), tmp_path, ("cpu",), "fp32", keep_checkpoints=False)
    table = experiment.run_tagging(session, tmp_path / "data").table
    assert table.rows == [["upos: amos_tiny (10 updates)", "10.0"]]
    expected = "upos: warmup0.1, selected from 2 combinations by the highest median on the same dev set"
    assert table.notes[2:] == [expected, "each run is scored at its best epoch on the same dev set"]
    assert "tagging-" not in "".join(table.notes)


def test_words_of_other_sentences_are_refused_before_the_training(tmp_path):
    data = prepare_tagging(tmp_path)
    checkpoint = SimpleNamespace(max_positions=64, check_tokenizer=lambda directory: None)
    lines = (data / "valid.words.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(Tagging(data, checkpoint, validates=False).words) == len(lines)
    (data / "valid.words.jsonl").write_text("".join(lines[1:] + lines[:1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"valid\.words\.jsonl is not the file that prepare\.sh wrote"):
        Tagging(data, checkpoint, validates=False)
    manifest = json.loads((data / "tagging.json").read_text(encoding="utf-8"))
    del manifest["sha256"]  # data of an earlier version
    (data / "tagging.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match=r"valid\.words\.jsonl does not belong to the labels: prepare the data again"):
        Tagging(data, checkpoint, validates=False)


def test_a_folder_that_fairseq_would_separate_is_refused_before_the_training(tmp_path):
    checkpoint = SimpleNamespace(max_positions=64, check_tokenizer=lambda directory: None)
    with pytest.raises(UserError, match="a:b: fairseq separates folders at ':': give a path without it"):
        Tagging(tmp_path / "a:b", checkpoint, validates=False)
