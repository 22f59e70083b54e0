"""``amos tag`` before and after the training: what it refuses, and the table of results that were not trained."""

import dataclasses
import json
from pathlib import Path

import pytest
from synthetic_tagging import prepare_tagging

from amos_fairseq.downstream.recipes import load_recipe
from amos_fairseq.downstream.results import RunResult, write_result
from amos_fairseq.downstream.runner import Runner, run_benchmark
from amos_fairseq.downstream.session import PretrainedCheckpoint, Session
from amos_fairseq.downstream.tagging.command import open_tagging, word_trials
from amos_fairseq.downstream.views import TAGGING_VIEWS
from amos_fairseq.errors import UserError


@pytest.fixture
def session(tmp_path, monkeypatch) -> Session:
    """A grid of two trials on a checkpoint that takes every tokenizer."""
    monkeypatch.setattr(PretrainedCheckpoint, "check_tokenizer", lambda self, directory: None)
    file, settings = Path("checkpoint_last.pt"), {"max_positions": 100}
    checkpoint = PretrainedCheckpoint(file, "", "amos_tiny", settings, {}, num_updates=10)
    overrides = {"lr": 1e-5, "epochs": 2, "batch_size": 16}
    recipe = load_recipe("amos_grid", "small", overrides)
    return Session(checkpoint, recipe, overrides, (1,), tmp_path / "out", ("cpu",), "float32", keep_checkpoints=False)


def execute(self, runs):
    """Every run scores 100 times its warm-up."""
    out = self.benchmark.session.out
    for run in runs:
        run.directory.mkdir(parents=True)
        scores = {"accuracy": 100 * run.hyperparameters.warmup}
        own = [run.task.name, run.trial, 1, str(run.directory.relative_to(out)), "accuracy", scores]
        write_result(out, RunResult(*own, "checkpoint_best.pt", 1, 1, None, run.identity))
    return []


def test_notes_of_a_grid_name_the_column(session, tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "execute", execute)
    table = run_benchmark(open_tagging(session, [prepare_tagging(tmp_path, "--column", "pos")])).table
    assert table.rows == [["pos: amos_tiny (10 updates)", "10.0"]]
    expected = "pos: warmup0.1, selected from 2 combinations by the highest median on the same dev set"
    assert table.notes[2:] == [expected, "each run is scored at its best epoch on the same dev set"]
    assert "tagging-" not in "".join(table.notes)


def test_settings_of_a_recipe_without_use_are_left_out_and_flags_refused(session, tmp_path):
    """So two trials that differ in such a setting alone are one."""
    (tmp_path / "recipe.yaml").write_text(
        "extends: electra\ntasks: {tagging: {views: 'full,forward'}}\ngrid: {view_layers: [half, all]}\n"
    )

    def trials(**flags):
        recipe = load_recipe(str(tmp_path / "recipe.yaml"), "small", flags)
        own = dataclasses.replace(session, recipe=recipe, overrides=flags)
        return [(own.views, own.view_layers) for own in word_trials(own, TAGGING_VIEWS, with_unlabeled=True)]

    assert trials() == [("full,forward", "half"), ("full,forward", "all")]
    assert trials(views="word_dropout") == [("word_dropout", "half")]
    assert trials(views="forward,full", view_layers="all") == [("full,forward", "all")]  # in one order
    with pytest.raises(UserError, match="--view-layers has no effect with --views word_dropout: leave it out"):
        trials(views="word_dropout", view_layers="all")


def test_words_of_other_sentences_are_refused_before_the_training(session, tmp_path):
    data = prepare_tagging(tmp_path)
    lines = (data / "valid.words.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(open_tagging(session, [data]).parts["chunk"].words) == len(lines)
    (data / "valid.words.jsonl").write_text("".join(lines[1:] + lines[:1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"valid\.words\.jsonl is not the file that amos prepare wrote"):
        open_tagging(session, [data])
    manifest = json.loads((data / "tagging.json").read_text(encoding="utf-8"))
    del manifest["sha256"]  # data of an earlier version
    (data / "tagging.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match=r"valid\.words\.jsonl does not belong to the labels: prepare the data again"):
        open_tagging(session, [data])


def test_folders_that_cannot_be_used_are_refused_before_the_training(session, tmp_path):
    with pytest.raises(UserError, match="a:b: fairseq separates folders at ':': give a path without it"):
        open_tagging(session, [tmp_path / "a:b"])
    with pytest.raises(UserError, match=r"is the directory of the data, which has a tagging\.json too"):
        open_tagging(session, [session.out])
