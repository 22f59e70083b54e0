"""GLUE's data, predictions and flags on synthetic rows, without the training process."""

import shutil
import threading
from collections import Counter

import pytest
import torch
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from synthetic_glue import INFERENCE, change_task, session

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.downstream.prediction import batches
from amos_fairseq.downstream.texts.command import read_text_data
from amos_fairseq.downstream.texts.dataset import open_texts
from amos_fairseq.downstream.texts.glue.command import open_glue
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.benchmark import Stopped
from amos_fairseq.experiments.records import read_result
from amos_fairseq.experiments.table import run_benchmark


def test_rows_are_those_of_fairseqs_task(data):
    """In order, with all special symbols, where no row is cut."""
    for task, separator in (("CoLA", None), ("STS-B", None), ("STS-B", 2)):
        kind = {"regression_target": task == "STS-B", "num_classes": 1 if task == "STS-B" else 2}
        order = {"max_positions": 80, "no_shuffle": True, "seed": 1}
        symbols = {"init_token": 0, "separator_token": separator}
        cfg = SentencePredictionConfig(data=str(data / task), **kind, **order, **symbols)
        theirs = SentencePredictionTask.setup_task(cfg).load_dataset("valid")
        prepared = read_text_data(data / task)
        items = (theirs[i] for i in range(len(theirs)))
        rows = open_texts(prepared.directory, "valid", 80, separator)
        for number, (label, item) in enumerate(zip(prepared.labels("valid"), items, strict=True)):
            row = rows[number]
            assert len(row) == rows.sizes[number]
            assert torch.equal(row, item["net_input.src_tokens"])
            assert float(label) == float(torch.as_tensor(item["target"]).item())
            assert row.tolist().count(2) == (1 if task == "CoLA" else 3 if separator else 2)
        assert rows.num_cut == 0


def test_batches_have_every_row_once_longest_first():
    stop, lengths = threading.Event(), (3, 9, 1, 9, 5000, 4000, 200)
    found = list(batches(lengths, stop))
    assert sorted(row for rows in found for row in rows) == list(range(7))
    assert found[0] == [4]
    assert all(len(rows) * max(lengths[row] for row in rows) <= 8192 for rows in found)
    stop.set()
    with pytest.raises(Stopped):
        next(batches(lengths, stop))


def test_predictions_are_those_of_single_rows_through_the_model(data, tmp_path, glue):
    glue(tmp_path, "STS-B", "MNLI")
    for task, split in (("STS-B", "valid"), ("MNLI", "valid1")):
        (directory,) = (tmp_path / "runs" / task).glob("*/seed1")
        prepared, loaded = read_text_data(data / task), load_checkpoint(directory / "checkpoint_best.pt")
        rows = [line.split("\t") for line in (directory / f"predictions.{split}.tsv").read_text().splitlines()]
        assert rows.pop(0) == ["index", "prediction", "label", *["probability"] * (task == "MNLI")]
        assert [row[0] for row in rows] == [str(i) for i in range(len(rows))]
        inputs = open_texts(prepared.directory, split, 80, 2)  # the recipe's separators
        texts = [inputs[number] for number in range(len(inputs))]
        for row, text, label in zip(rows, texts, prepared.labels(split), strict=True):
            with torch.no_grad():
                logits, _ = loaded.model(text[None], features_only=True, classification_head_name=TEXT_HEAD)
            if task == "STS-B":
                # Four digits are written, and padding changes sums by float32 rounding.
                assert float(row[1]) == pytest.approx(logits.item(), abs=1e-3)
                assert float(row[2]) == label
            else:
                assert row[1] == INFERENCE[logits.argmax()]
                assert row[2] == INFERENCE[label]
    right = [row[1] == row[2] for row in rows]
    assert read_result(directory).scores["accuracy_mm"] == pytest.approx(100 * sum(right) / len(right))


def test_flags_describe_the_checkpoint_and_the_task(start, tmp_path, fake_training, glue):
    glue(tmp_path, "CoLA", "STS-B")
    (cola, sts), flag = fake_training.commands, fake_training.flag
    settings = read_state(start / "checkpoint_last.pt")["cfg"]["model"]
    for name in ("encoder_layers", "encoder_embed_dim", "max_positions", "layer_norm_eps", "relative_position_scheme"):
        assert f"--{name.replace('_', '-')}={settings[name]}" in cola
    assert flag(cola, "--arch") == "amos"
    assert flag(cola, "--finetune-from-model") == str(start / "checkpoint_last.pt")
    assert (flag(cola, "--best-checkpoint-metric"), flag(sts, "--best-checkpoint-metric")) == ("matthews", "spearman")
    # 40 rows in batches of 32, ten epochs, a tenth of them rising; 20 rows in batches of 16
    assert [flag(cola, f) for f in ("--total-num-update", "--warmup-updates", "--lr")] == ["20", "2", "2e-05"]
    assert [flag(sts, f) for f in ("--total-num-update", "--warmup-updates", "--lr")] == ["20", "1", "4e-05"]


def test_constants_by_hand(data):
    """The most frequent class of the training rows, on each dev set; the mean has no correlation with anything."""
    mnli = read_text_data(data / "MNLI")
    most, _ = Counter(mnli.labels("train").tolist()).most_common(1)[0]
    shares = [100 * mnli.labels(split).tolist().count(most) / count for split, count in (("valid", 11), ("valid1", 10))]
    constants = mnli.constant(mnli.dev_splits)
    assert constants.num_scored == 11
    expected = dict(zip(("accuracy", "accuracy_mm"), shares, strict=True))
    assert constants.scores == {"most frequent class": pytest.approx(expected)}
    assert read_text_data(data / "STS-B").constant({"valid": ""}).scores == {
        "mean of training": {"spearman": 0, "pearson": 0}
    }


@pytest.mark.parametrize("name", ["adapt.yaml", "checkpoint_last.pt"])
def test_the_folder_of_another_command_is_no_out(name, start, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match="is that of amos adapt or a SAVE_DIR: give another"):
        session(start, tmp_path, "classification")


def test_small_tasks_can_start_from_a_run_of_mnli(data, tmp_path, fake_training, glue):
    glue(tmp_path / "out", "MNLI")
    (mnli,) = tmp_path.glob("out/runs/MNLI/*/seed1")
    run_benchmark(open_glue(session(mnli, tmp_path / "other", seeds=1), {"RTE": data / "RTE"}))
    assert fake_training.flag(fake_training.commands[-1], "--finetune-from-model") == str(mnli / "checkpoint_best.pt")


def test_hash_of_the_data_changes_with_training_and_dev_data_only(data, tmp_path):
    shutil.copytree(data / "RTE", tmp_path / "RTE")
    before, record = read_text_data(tmp_path / "RTE").sha256(), read_text_data(tmp_path / "RTE").record
    splits = record["splits"]
    change_task(tmp_path, "RTE", splits=splits | {"test": {"source": "test.tsv", "rows": 5}}, workers=3)
    assert read_text_data(tmp_path / "RTE").sha256() == before
    for change in (
        {"splits": splits | {"valid": splits["valid"] | {"sha256": "0" * 64}}},
        {"splits": splits | {"train": splits["train"] | {"rows": 15}}},
        {"labels": record["labels"][::-1]},
        {"tokenizer_sha256": "1" * 64},
        {"settings": {"seed": 2}},
    ):
        change_task(tmp_path, "RTE", **record | change)
        assert read_text_data(tmp_path / "RTE").sha256() != before, change
