"""Several tasks in one model, end to end: bits of runs with teachers, ranks and stops; ``amos glue --multi-task``, exports."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from fine_tuning_tasks import assert_exact_on_ranks_and_after_a_kill, fine_tune
from interrupted_run import checkpoint, num_updates, records
from synthetic_glue import write_glue, write_pretrained_checkpoint
from tiny_runs import run_of

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.downstream.texts.command import read_text_data
from amos_fairseq.downstream.texts.dataset import open_texts

pytestmark = pytest.mark.slow

LAST_UPDATE = 20
FLAGS = f"""--user-dir amos_fairseq --task multi_task --criterion multi_task --cpu --num-workers 0 --tokens-per-text 80
--optimizer grouped_adam --lr 1e-3 --max-update {LAST_UPDATE} --log-interval 1 --log-format simple --seed 1
--save-interval-updates 5 --no-epoch-checkpoints --max-positions 80
--arch amos --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 2"""
RECIPE = """\
extends: bam
defaults: {lr: 3.0e-3, epochs: 2, batch_size: 8, warmup: 0.1, head: linear, checkpoint: last}
sizes: {}
tasks: {RTE: {}, CoLA: {}, STS-B: {}, multi: {epochs: 3, batch_size: 16}}
"""
TASKS = ("CoLA", "RTE", "STS-B")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A checkpoint, three tasks of GLUE, a recipe, and random teachers."""
    place = tmp_path_factory.mktemp("multi")
    write_pretrained_checkpoint(place / "start")
    rows = {"train": 40, "valid": 11}
    write_glue(place / "data", place / "start", "CoLA", ["0", "1"], {"train": 60, "valid": 13}, pair=False)
    write_glue(place / "data", place / "start", "RTE", ["entailment", "not_entailment"], rows, pair=True)
    write_glue(place / "data", place / "start", "STS-B", [], rows, pair=True)
    (place / "recipe.yaml").write_text(RECIPE)
    teacher = np.random.default_rng(1).random((100, 2)).astype(np.float32)
    scores = np.random.default_rng(2).random(40).astype(np.float32)
    np.save(place / "teacher.npy", np.concatenate([(teacher / teacher.sum(1, keepdims=True)).ravel(), scores]))
    return place


def test_bits_of_teachers_ranks_and_stops(place, tmp_path):
    """Two ranks are two micro-batches; a killed run continues exactly; the teacher's weight falls with the updates."""
    data = ":".join(str(place / "data" / task) for task in TASKS)
    flags = ["--teacher", place / "teacher.npy", "--batch-size", 8]
    run = assert_exact_on_ranks_and_after_a_kill(FLAGS, data, place, tmp_path, *flags)
    assert "classification_heads.STS-B.scale_bits" in checkpoint(run)["model"]
    assert num_updates(run) == LAST_UPDATE
    weights = [line["gold_weight"] for line in records(run) if line["split"] == "train"]
    assert weights == pytest.approx([update / LAST_UPDATE for update in range(LAST_UPDATE)], abs=1e-4)


def test_single_teachers_teach_one_model_of_all_tasks(place, tmp_path, capsys):
    data = ["--data", place / "data", "--tasks", "RTE,STS-B"]
    fine_tune("glue", place, place / "single", *data, "--write-train")
    fine_tune("glue", place, place / "bam", *data, "--multi-task", "--teachers", place / "single")
    table = (place / "bam" / "glue.md").read_text()
    assert "taught by single, each seed by the same seed; weight of the labels: from 0 to 1 over the updates" in table
    run = run_of(place / "bam", "multi")
    assert records(run)[-1]["update"] == 15  # 2 tasks of 40 rows, 3 epochs: 240 rows in updates of 16

    teachers = np.load(run / "teacher.npy")
    names = {"RTE": ["entailment", "not_entailment"], "STS-B": ["score"]}
    expected = []
    for task, columns in names.items():
        lines = (run_of(place / "single", task) / "train" / f"{task}.tsv").read_text().splitlines()
        assert lines[0].split("\t") == ["index", *columns]
        assert len(lines) == 41
        expected += [float(value) for line in lines[1:] for value in line.split("\t")[1:]]
    np.testing.assert_allclose(teachers, expected, rtol=1e-6)  # seven digits

    encoder = amos_fairseq.load(run)
    assert encoder(["the quick fox"]).pooled().shape == (1, 16)
    assert_scores_are_those_of_heads(place, run)
    main(["export", str(run), str(tmp_path / "encoder"), "--no-check"])
    assert "MPNetModel, the encoder" in capsys.readouterr().out
    kinds = {"STS-B": "regression", "RTE": "single_label_classification"}
    for task, kind in kinds.items():
        main(["export", str(run), str(tmp_path / task), "--head", task])
        config = transformers.AutoConfig.from_pretrained(tmp_path / task)
        assert config.problem_type == kind
    assert list(config.id2label.values()) == names["RTE"]


def assert_scores_are_those_of_heads(place, run):
    """The table of predictions of a task, row by row through its own head, and the scores of all tasks."""
    data, loaded = read_text_data(place / "data" / "RTE"), load_checkpoint(run)
    lines = [line.split("\t") for line in (run / "predictions.RTE.valid.tsv").read_text().splitlines()[1:]]
    inputs = open_texts(data.directory, "valid", 80, loaded.separator)
    for number, (_, prediction, label, *_) in enumerate(lines):
        with torch.no_grad():
            logits, _ = loaded.model(inputs[number][None], classification_head_name="RTE")
        assert data.label_names[int(logits.argmax())] == prediction
        assert data.label_names[int(data.labels("valid")[number])] == label
    scores = json.loads((run / "result.json").read_text())["scores"]
    accuracy = 100 * np.mean([prediction == label for _, prediction, label, *_ in lines])
    assert scores["RTE accuracy"] == pytest.approx(accuracy)
    assert scores["average"] == pytest.approx((scores["RTE accuracy"] + scores["STS-B spearman"]) / 2)
