"""Cross-view training end to end: bits of ranks and stops, ``amos tag --views``, several columns, ``amos parse --views``."""

import json
import re
import shlex
from pathlib import Path

import pytest
import transformers
from failures import error_line
from fine_tuning_tasks import fine_tune
from forked_command import run_command
from interrupted_run import assert_same_bits, assert_same_run, killed_at, num_updates, records
from synthetic_squad import untrained_checkpoint
from synthetic_tagging import NAMES_OF_COLUMNS, make_sentences, prepare_tagging, write_columns
from tiny_runs import run_of

from amos_fairseq.checkpoints.read import load_checkpoint, read_state
from amos_fairseq.cli.main import main

pytestmark = pytest.mark.slow

LAST_UPDATE = 16
FLAGS = f"""--user-dir amos_fairseq --task sequence_tagging --criterion sequence_tagging --cpu --num-workers 0
--tokens-per-sentence 40 --views full,forward,past,word_dropout --unlabeled-start 0.2 --label-smoothing 0.1
--optimizer grouped_adam --lr 1e-3 --max-update {LAST_UPDATE} --log-interval 1 --log-format simple --seed 1
--arch amos_tiny --encoder-ffn-embed-dim 128 --max-positions 40
--save-interval-updates 5 --no-epoch-checkpoints"""
RECIPE = """\
defaults: {lr: 3.0e-3, epochs: 6, batch_size: 8, warmup: 0.1, dropout: 0, attention_dropout: 0, checkpoint: last}
tasks: {tagging: {min_updates: 60}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An untrained checkpoint, 12 sentences with labels of entities and 28 without, and all with parts of speech."""
    place = tmp_path_factory.mktemp("views")
    prepare_tagging(place / "ner", "--labeled", "12", "--unlabeled", "rest")
    prepare_tagging(place / "pos", "--column", "pos")
    untrained_checkpoint(place / "start", place / "ner" / "data", 40)
    (place / "recipe.yaml").write_text(RECIPE)
    return place


def train_command(place: Path, out: Path, *flags: str) -> list[str]:
    start = place / "start" / "checkpoint_last.pt"
    given = [place / "ner" / "data", *shlex.split(FLAGS), "--finetune-from-model", start, "--save-dir", out, *flags]
    return list(map(str, given))


def test_bits_of_ranks_and_stops(place, tmp_path):
    """Two ranks are two micro-batches, also while the modules of the views learn alone; a killed run continues exactly."""
    halves = ["--batch-size", "2", "--update-freq", "2"]
    run_command("fairseq_cli.train", train_command(place, tmp_path / "alone", *halves), 1)
    run_command("fairseq_cli.train", train_command(place, tmp_path / "ranks", *halves[:2]), 2)
    found, expected = (read_state(tmp_path / run / "checkpoint_last.pt")["model"] for run in ("ranks", "alone"))
    assert num_updates(tmp_path / "alone") == LAST_UPDATE
    assert_same_bits(found, expected, "model")
    assert any(key.startswith("cross_views.") for key in expected)
    trained = [line for line in records(tmp_path / "alone") if line["split"] == "train"]
    # 0.2 of 16 updates: in the first four no word is dropped.
    assert [("kl_word_dropout" in line) for line in trained] == [update > 4 for update in range(1, LAST_UPDATE + 1)]
    assert all("labeled_loss" in line for line in trained)
    parts = [trained[-1][f"kl_{view}"] for view in ("full", "forward", "past", "word_dropout")]
    assert trained[-1]["cvt_loss"] == pytest.approx(sum(parts), abs=3e-4)

    stopped = killed_at(5, tmp_path / "alone", tmp_path / "stopped")
    run_command("fairseq_cli.train", train_command(place, stopped, *halves))
    assert_same_run(stopped, tmp_path / "alone")


def test_one_model_of_two_columns(place, tmp_path):
    folders = [place / "ner" / "data", place / "pos" / "data"]
    best = tmp_path / "best.yaml"  # the best checkpoint by the average of the main scores, so that both are validated
    best.write_text(RECIPE.replace("checkpoint: last", "checkpoint: best"))
    test = write_columns(tmp_path / "test.txt", make_sentences(20, seed=2))
    words = ["--data", *folders, "--views", "future,past", "--recipe", best, "--test", test, *NAMES_OF_COLUMNS]
    printed = fine_tune("tag", place, tmp_path / "out", *words)
    assert "views future,past" in printed
    assert "seed1/checkpoint_best.pt HF_DIR --head ner" in printed
    run = run_of(tmp_path / "out", "tagging-ner,pos")
    table = (tmp_path / "out" / "tagging.md").read_text(encoding="utf-8")  # no row of it is broken
    assert "| ner of ner,pos: synthetic |" in table
    assert "| pos of ner,pos: synthetic |" in table
    tables = [f"ner, {part}" for part in ("test", "spans of dev", "spans of test")]
    tables += [f"pos, {part}" for part in ("test", "words of dev", "words of test")]
    assert re.findall("^## (.*)", table, re.MULTILINE) == tables
    assert {"ner.predictions.test.txt", "pos.scores.test.json"} <= {path.name for path in run.iterdir()}
    scores = json.loads((run / "result.json").read_text())["scores"]
    assert scores["average"] == pytest.approx((scores["ner f1"] + scores["pos accuracy"]) / 2)
    assert scores["pos accuracy"] > 80
    assert not any(key.startswith("cross_views.") for key in read_state(load_checkpoint(run).file)["model"])
    validated = [line for line in records(run) if line["split"] == "valid"]
    assert max(line["average"] for line in validated) == pytest.approx(scores["average"], abs=0.01)
    assert validated[-1].keys() >= {"f1_ner", "accuracy_ner", "accuracy_pos"}
    for column in ("ner", "pos"):
        own = json.loads((run / f"{column}.scores.json").read_text())
        assert own["accuracy"] == scores[f"{column} accuracy"]
        lines = (run / f"{column}.predictions.txt").read_text(encoding="utf-8").splitlines()
        rows = [line.split("\t") for line in lines if line]
        share = 100 * sum(gold == found for _, gold, found in rows) / len(rows)
        # A word that is cut is wrong, also where its prediction O happens to be its label.
        assert share == pytest.approx(own["accuracy"]) if column == "pos" else share > own["accuracy"]
    files = ["--predict", tmp_path / "words.txt", "--out", tmp_path / "labels"]
    write_columns(tmp_path / "words.txt", make_sentences())
    main(["tag", "--checkpoint", str(tmp_path / "out"), *map(str, files), "--cpu"])
    texts = [(run / f"{column}.predictions.txt").read_text(encoding="utf-8") for column in ("ner", "pos")]
    rows = zip(*map(str.splitlines, texts), strict=True)
    expected = ["\t".join([*one.split("\t")[::2], *other.split("\t")[2:]]) for one, other in rows]
    labeled = (tmp_path / "labels").read_text(encoding="utf-8")
    found, of_dev = (text.strip("\n").split("\n\n") for text in (labeled, "\n".join(expected)))
    # Sentences that are cut on dev are read in windows.
    pairs = [pair for pair in zip(found, of_dev, strict=True) if "<cut>" not in pair[1]]
    assert len(pairs) == len(of_dev) - 4
    assert all(one == other for one, other in pairs)
    labels = {}
    for column in ("ner", "pos"):
        main(["export", str(run), str(tmp_path / column), "--head", column])
        model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / column)
        labels[column] = set(model.config.label2id)
    assert labels["ner"] == {"B-NAME", "I-NAME", "O"}
    assert labels["pos"] >= {"VERB", "proper noun"}


def test_what_does_not_fit_is_refused_in_one_line(place, tmp_path, capsys):
    start = ["--checkpoint", place / "start", "--out", tmp_path / "out", "--recipe", place / "recipe.yaml", "--cpu"]
    data = {name: place / name / "data" for name in ("ner", "pos")}
    source = write_columns(tmp_path / "train.txt", make_sentences())
    files = ["--train", source, "--dev", source]
    for flags, message in (
        (["--data", data["pos"], "--views", "full"], "--views full needs sentences without labels: give them with"),
        ([*files, "--unlabeled", source], "only --views learn from these sentences: give --views"),
        (["--data", data["ner"], "--views", "full", "--set", "unlabeled_start=1"], "--unlabeled-start 1.0 must be"),
    ):
        assert message in error_line(capsys, main, "tag", *start, *flags, reports_progress=True), flags
    assert not (tmp_path / "out").exists()
