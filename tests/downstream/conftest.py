"""Synthetic GLUE data, a checkpoint to start from, and a training without a process."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from preparing import prepare
from synthetic_glue import (
    INFERENCE,
    folders,
    session,
    write_glue,
    write_glue_tokenizer,
    write_pretrained_checkpoint,
    write_raw_glue,
)

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.downstream.model import TEXT_HEAD, TextModel
from amos_fairseq.downstream.texts.dataset import head_outputs
from amos_fairseq.downstream.texts.glue.command import GlueOptions, open_glue
from amos_fairseq.experiments import runner as runner_module
from amos_fairseq.experiments.table import run_benchmark


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    write_pretrained_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def data(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    write_glue(directory, start, "CoLA", ["0", "1"], {"train": 40, "valid": 13, "test": 7}, pair=False)
    write_glue(directory, start, "STS-B", [], {"train": 20, "valid": 9, "test": 5}, pair=True)
    rows = {"train": 30, "valid": 11, "valid1": 10, "test": 6, "test1": 4}
    write_glue(directory, start, "MNLI", INFERENCE, rows, pair=True)
    write_glue(directory, start, "RTE", ["entailment", "not_entailment"], {"train": 16, "valid": 8}, pair=True)
    write_glue(directory, start, "AX", INFERENCE, {"test": 3}, pair=True)
    return directory


@pytest.fixture
def fake_training(start, monkeypatch):
    """Record each command, and write the model that it would train with random weights of the seed."""
    commands, checkpoint = [], start / "checkpoint_last.pt"

    def flag(command, name, default=None):
        return command[command.index(name) + 1] if name in command else default

    def train(command, directory, variables, stop, report):
        commands.append(command)
        state = read_state(checkpoint)
        cfg = argparse.Namespace(**state["cfg"]["model"])
        torch.manual_seed(int(flag(command, "--seed")))
        model = TextModel(cfg, load_checkpoint(checkpoint).model.vocabulary)
        directories = command[1].split(":")
        records = [json.loads((Path(own) / "task.json").read_text(encoding="utf-8")) for own in directories]
        heads = state["task_state"]["heads"] = {}
        for record in records:
            name = TEXT_HEAD if flag(command, "--task") == "text_classification" else record["task"]
            model.register_classification_head(name, record["num_classes"])
            heads[name] = dataclasses.asdict(head_outputs(record))
        for parameter in model.classification_heads.parameters():
            torch.nn.init.normal_(parameter)
        task, separator = {"_name": "text_classification"}, flag(command, "--separator-token")
        task |= {} if separator is None else {"separator_token": int(separator)}
        state |= {"cfg": {"model": vars(cfg), "task": task}, "model": model.state_dict(), "last_optimizer_state": {}}
        for name in ("best", "last"):
            torch.save(state, directory / f"checkpoint_{name}.pt")

    monkeypatch.setattr(runner_module, "train", train)
    return argparse.Namespace(commands=commands, flag=flag)


@pytest.fixture
def glue(start, data, fake_training):
    """Run ``amos glue`` with the tasks; options of the session (one seed) and of the benchmark by name."""

    def run(out, *tasks, data=data, with_test=False, seeds=1, **options):
        chosen = GlueOptions(with_test=with_test)
        outcome = run_benchmark(
            open_glue(session(start, out, seeds=seeds, **options), folders(data, [*tasks, *["AX"] * with_test]), chosen)
        )
        assert outcome.failures == []
        return outcome

    return run


@pytest.fixture(scope="session")
def raw_glue(tmp_path_factory):
    return write_raw_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def glue_tokenizer(tmp_path_factory):
    """A tokenizer with a piece for each of their letters."""
    return write_glue_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer")


@pytest.fixture(scope="session")
def prepared_glue(raw_glue, glue_tokenizer, tmp_path_factory):
    """The output of amos prepare for all of them; tests must not change it."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare("glue")([str(raw_glue), "ALL", str(glue_tokenizer), str(out), "--workers", "2"])
    return out
