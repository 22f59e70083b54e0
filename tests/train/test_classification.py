"""``amos classify`` end to end: a small model learns classes, several labels and a number; files beside scikit-learn, and the
exported pipeline."""

import csv
import json
import os
import pty
import random
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from failures import error_line
from fine_tuning_tasks import fine_tune, fine_tuning_words, train, write_recipe
from interrupted_run import assert_same_bits, checkpoint, num_updates, records
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from sklearn.preprocessing import MultiLabelBinarizer
from synthetic_squad import untrained_checkpoint
from tiny_runs import ROOT, run_of, wait_until

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.cli.main import main
from amos_fairseq.text.vocabulary import learn_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("modules_cache")]

WORDS = ["the", "house", "is", "very", "old", "and", "green"]
COLOURS = ["red", "blue", "grey"]
MAX_POSITIONS = 16
TWO_UPDATES = """--user-dir amos_fairseq --task text_classification --criterion text_classification --arch amos_tiny --cpu
--tokens-per-text 16 --max-positions 16 --encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --dropout 0.1
--optimizer grouped_adam --lr 1e-3 --batch-size 4 --similar-lengths --max-update 2 --num-workers 0 --no-epoch-checkpoints"""


def sentence(generator: random.Random, *more: str) -> str:
    words = [*generator.choices(WORDS, k=generator.randint(1, 8)), *more]
    generator.shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A checkpoint, and three tables: names of classes in TSV, a number for two texts in CSV, lists of labels in JSON lines."""
    place, generator = tmp_path_factory.mktemp("classify"), random.Random(1)
    (place / "text.txt").write_text("\n".join(sentence(generator, *COLOURS) for _ in range(100)), encoding="utf-8")
    learn_tokenizer(place / "text.txt", 100, cased=False).save(place / "data" / "tokenizer")
    untrained_checkpoint(place / "start", place / "data", MAX_POSITIONS)
    write_recipe(place, "classification", epochs=10, num_separators=2)
    with (place / "classes.tsv").open("w", encoding="utf-8") as tsv:
        tsv.write("colour\ttext\n")
        for colour in generator.choices(COLOURS, k=90):
            tsv.write(f"is {colour}!\t{sentence(generator, colour)}\n")
    for name, count in (("train", 90), ("dev", 30)):
        with (place / f"{name}.csv").open("w", encoding="utf-8", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["first", "second", "price"])
            for _ in range(count):
                one, two = (generator.randint(0, 1) for _ in range(2))
                texts = [sentence(generator, *["blue"] * one), sentence(generator, *["red"] * two)]
                writer.writerow([*texts, 1000 + 100 * one + 50.5 * two])
    rows = [[colour for colour in COLOURS if generator.random() < 0.5] for _ in range(90)]
    lines = (json.dumps({"text": sentence(generator, *tags), "tags": tags}) for tags in rows)
    (place / "labels.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def classes(place) -> Path:
    """Results of the table of classes."""
    fine_tune("classify", place, place / "classes", "--train", place / "classes.tsv", "--label", "colour")
    return place / "classes"


def label(results: Path, table: Path, out: Path) -> None:
    """In several parts of the table."""
    with mock.patch("amos_fairseq.downstream.texts.labeling.ROWS_AT_ONCE", 17):
        main(["classify", "--checkpoint", str(results), "--predict", str(table), "--out", str(out), "--cpu"])


def read_tsv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as table:
        return list(csv.DictReader(table, delimiter="\t"))


def summary(place: Path, out: str) -> dict[str, float]:
    content = json.loads((place / out / "classification.json").read_text())
    return {name: spread["median"] for name, spread in content["tasks"]["classification"]["scores"].items()}


def exported(place: Path, out: str):
    folder = place / out / "hf"
    main(["export", str(place / out), str(folder)])
    return transformers.pipeline("text-classification", model=str(folder), top_k=None, trust_remote_code=True)


def test_classes(place, classes, tmp_path):
    printed = (classes / "classification.md").read_text()
    assert "3 classes (is blue!, is grey!, is red!), inferred" in printed
    assert "dev: 18 rows of classes.tsv, chosen at random (seed 1); 72 rows train" in printed
    assert re.search(r"synthetic .*\n.*most frequent class ", printed)
    rows = read_tsv(run_of(classes, "classification") / "predictions.dev.tsv")
    found, gold = ([row[name] for row in rows] for name in ("prediction", "label"))
    table = (place / "classes.tsv").read_text().splitlines()
    assert [table[int(row["line"]) - 1].split("\t")[0] for row in rows] == gold
    scores = summary(place, "classes")
    assert scores["accuracy"] == pytest.approx(100 * accuracy_score(gold, found))
    assert scores["accuracy"] >= 75
    assert scores["macro_f1"] == pytest.approx(100 * f1_score(gold, found, average="macro"))
    assert scores["matthews"] == pytest.approx(100 * matthews_corrcoef(gold, found))
    log = (run_of(classes, "classification") / "train.log").read_text()
    assert f"best_accuracy {scores['accuracy']:.4f}".rstrip("0").rstrip(".") in log

    # Labels of the table itself are those of the pipeline; a row without text has none.
    source = tmp_path / "new.tsv"
    source.write_text((place / "classes.tsv").read_text() + "x\t\n", encoding="utf-8")
    label(classes, source, tmp_path / "l.tsv")
    labeled = read_tsv(tmp_path / "l.tsv")
    assert [row["colour"] for row in labeled] == [line.split("\t")[0] for line in source.read_text().splitlines()[1:]]
    without_text = labeled.pop()
    assert (without_text["colour"], without_text["prediction"], without_text["probability"]) == ("x", "", "")
    answers = exported(place, "classes")([row["text"] for row in labeled], truncation=True)
    for row, answer in zip(labeled, answers, strict=True):
        assert answer[0]["label"] == row["prediction"]
        assert answer[0]["score"] == pytest.approx(float(row["probability"]), abs=1e-4)
    card = (classes / "hf" / "README.md").read_text(encoding="utf-8")
    assert f"| accuracy {scores['accuracy']:.4g}," in card
    by_text = {row["text"]: row["prediction"] for row in labeled}
    assert [by_text[table[int(row["line"]) - 1].split("\t")[1]] for row in rows] == found
    by_text = {row["text"]: float(row["probability"]) for row in labeled}
    probabilities = [by_text[table[int(row["line"]) - 1].split("\t")[1]] for row in rows]
    assert [float(row["probability"]) for row in rows] == pytest.approx(probabilities, abs=1e-5), (
        "after the temperature"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_closed_terminal_and_a_signal_save_and_end_with_their_codes(number, code, place, tmp_path):
    """The leader of a session in a terminal, whose trainings are in sessions of their own."""
    flags = ["--train", place / "classes.tsv", "--label", "colour", "--epochs", 5000]
    command = [str(ROOT / "amos_start.py"), *fine_tuning_words("classify", place, tmp_path, *flags)]
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, *command])
    try:  # a terminal without a width gets no bar, and stores the few lines
        wait_until(lambda: any(file.read_text().count("\n") > 20 for file in tmp_path.rglob("metrics.jsonl")))
        os.close(terminal) if number == signal.SIGHUP else os.kill(process, number)
        ended = []
        wait_until(lambda: ended.append(os.waitpid(process, os.WNOHANG)) or ended[-1][0])
    except BaseException:
        os.kill(process, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(ended[-1][1]) == code
    (run,) = tmp_path.glob("runs/classification/*/seed1")
    assert f"stopped after update {num_updates(run)}, exit code 75" in (run / "train.log").read_text()


def test_a_number_for_two_texts(place, tmp_path, monkeypatch):
    """The values are near 1,000: a head without their scale would have a squared error near 10^6."""
    columns = ["--text", "first", "second", "--label", "price"]
    flags = ["--train", place / "train.csv", "--dev", place / "dev.csv", *columns]
    printed = fine_tune("classify", place, place / "number", *flags)
    assert "price: numbers of mean" in printed
    rows = read_tsv(run_of(place / "number", "classification") / "predictions.dev.tsv")
    found, gold = (np.array([float(row[name]) for row in rows]) for name in ("prediction", "label"))
    scores = summary(place, "number")
    assert scores["spearman"] == pytest.approx(100 * spearmanr(found, gold)[0])
    assert scores["pearson"] == pytest.approx(100 * pearsonr(found, gold)[0])
    assert scores["mse"] == pytest.approx(np.square(found - gold).mean())
    assert scores["mse"] < gold.var()
    out = tmp_path / "l.jsonl"
    label(place / "number", place / "dev.csv", out)
    labeled = [json.loads(line) for line in out.read_text().splitlines()]
    np.testing.assert_allclose([row["prediction"] for row in labeled], found, rtol=1e-6)
    tagger = exported(place, "number")
    assert tagger.model.config.problem_type == "regression"
    pairs = [{"text": row["first"], "text_pair": row["second"]} for row in labeled]
    for pair, row in zip(pairs, labeled, strict=True):
        assert tagger(pair, truncation=True)[0]["score"] == pytest.approx(row["prediction"], rel=1e-5)
    monkeypatch.chdir(place / "number")
    card = Path("hf/README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names := {})
    expected = tagger({"text": "One text.", "text_pair": "And another."}, truncation=True)[0]["score"]
    assert names["number"] == pytest.approx(expected, rel=1e-5)
    assert "It predicts a number in the unit of the labels" in card
    assert "LABEL_0" not in card


def test_several_labels(place):
    table = place / "labels.jsonl"
    given = ["--train", table, "--dev", table, "--label", "tags", "--pooling", "mean"]
    printed = fine_tune("classify", place, place / "labels", *given)
    assert "tags: 3 labels (blue, grey, red), inferred" in printed
    rows = read_tsv(run_of(place / "labels", "classification") / "predictions.dev.tsv")
    one_hot = MultiLabelBinarizer()
    gold, found = (one_hot.fit_transform([json.loads(row[name]) for row in rows]) for name in ("label", "prediction"))
    scores = summary(place, "labels")
    for average in ("micro", "macro"):
        assert scores[f"{average}_f1"] == pytest.approx(100 * f1_score(gold, found, average=average))
    assert scores["micro_f1"] > 90
    tagger = exported(place, "labels")
    assert tagger.model.config.problem_type == "multi_label_classification"
    texts = [json.loads(line)["text"] for line in (place / "labels.jsonl").read_text().splitlines()]
    for row, answer in zip(rows, tagger(texts, truncation=True), strict=True):
        assert sorted(own["label"] for own in answer if own["score"] > 0.5) == json.loads(row["prediction"])


def train_two_updates(place: Path, classes: Path, out: Path, num_ranks: int, *flags: object) -> Path:
    (data,) = (classes / "data").glob("classification-*")
    return train(TWO_UPDATES, data, place, out, *flags, num_ranks=num_ranks)


def test_two_ranks_train_and_score_as_one(place, classes, tmp_path):
    """Two micro-batches of one rank are those of two ranks, to the bit; the rows of both are scored together."""
    runs = [train_two_updates(place, classes, tmp_path / str(n), n, "--update-freq", 3 - n) for n in (1, 2)]
    alone, together = (
        [[line[key] for key in ("loss", "accuracy", "macro_f1")] for line in records(run) if line["split"] == "valid"]
        for run in runs
    )
    assert alone == together
    assert_same_bits(*(checkpoint(run)["model"] for run in runs), "model")


def test_a_frozen_encoder_keeps_its_bits(place, classes, tmp_path):
    state = checkpoint(train_two_updates(place, classes, tmp_path, 2, "--freeze-encoder"))
    start = load_checkpoint(place / "start" / "checkpoint_last.pt").model
    before = {f"encoder.{name}": value for name, value in start.encoder.state_dict().items()}
    before |= {f"embed_tokens.{name}": value for name, value in start.embed_tokens.state_dict().items()}
    assert all(torch.equal(state["model"][name], value) for name, value in before.items())
    of_head = [value for name, value in state["model"].items() if name not in before]
    trained = state["last_optimizer_state"]["state"].values()
    assert sorted(value["exp_avg"].shape for value in trained) == sorted(value.shape for value in of_head)
    assert all(value["exp_avg"].abs().sum() > 0 for value in trained)


def test_options_for_few_labels(place, tmp_path):
    """The mean of all states trains, and is used for other rows; the folder's own class gives the same."""
    given = ["--train", place / "classes.tsv", "--label", "colour", "--epochs", 1, "--min-updates", 100]
    fine_tune("classify", place, place / "few", *given, "--pooling", "mean")
    printed = (place / "few" / "classification.md").read_text()
    assert all(option in printed for option in ("epochs 1", "min_updates 100", "pooling mean"))
    log = (run_of(place / "few", "classification") / "train.log").read_text()
    # 12 epochs of 72 rows, the smallest number with 100 updates, are one epoch of the recipe: one score on dev.
    assert "num_updates 108 " in log
    assert log.count("| valid |") == log.count("Saved checkpoint") == 1
    assert summary(place, "few")["accuracy"] > 80
    rows = read_tsv(run_of(place / "few", "classification") / "predictions.dev.tsv")
    label(place / "few", place / "classes.tsv", tmp_path / "l.tsv")
    lines = read_tsv(tmp_path / "l.tsv")
    assert [lines[int(row["line"]) - 2]["prediction"] for row in rows] == [row["prediction"] for row in rows]
    for row, answer in zip(lines, exported(place, "few")([row["text"] for row in lines], batch_size=16), strict=True):
        expected = row["prediction"], pytest.approx(float(row["probability"]), abs=1e-4)
        assert (answer[0]["label"], answer[0]["score"]) == expected


def test_what_cannot_be_used_is_refused_in_one_line(place, tmp_path, capsys):
    start = ["--checkpoint", place / "start", "--out", tmp_path / "out"]
    for flags, message in (
        (start, "give the table to train on as --train"),
        ([*start, "--predict", place / "classes.tsv"], "with --predict it is a file"),
    ):
        assert message in error_line(capsys, main, "classify", *flags, reports_progress=True), flags
    assert not list(tmp_path.iterdir())
