"""Cross-view training end to end: bits of ranks and stops, ``amos tag --views``, several columns, ``amos parse --views``."""

import json
import re
from pathlib import Path

import pytest
import transformers
from failures import error_line
from fine_tuning_tasks import assert_exact_on_ranks_and_after_a_kill, fine_tune, write_recipe
from interrupted_run import checkpoint, num_updates, records
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


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """An untrained checkpoint, 12 sentences with labels of entities and 28 without, and all with parts of speech."""
    place = tmp_path_factory.mktemp("views")
    prepare_tagging(place / "ner", "--labeled", "12", "--unlabeled", "rest")
    prepare_tagging(place / "pos", "--column", "pos")
    untrained_checkpoint(place / "start", place / "ner" / "data", 40)
    # The best checkpoint by the average of the main scores, so that both are validated.
    write_recipe(place, "tagging", epochs=6, min_updates=60, checkpoint="best")
    return place


def test_bits_of_ranks_and_stops(place, tmp_path):
    """Two ranks are two micro-batches, also while the modules of the views learn alone; a killed run continues exactly."""
    run = assert_exact_on_ranks_and_after_a_kill(FLAGS, place / "ner" / "data", place, tmp_path, "--batch-size", 2)
    assert num_updates(run) == LAST_UPDATE
    assert any(key.startswith("cross_views.") for key in checkpoint(run)["model"])
    trained = [line for line in records(run) if line["split"] == "train"]
    # 0.2 of 16 updates: in the first four no word is dropped.
    assert [("kl_word_dropout" in line) for line in trained] == [update > 4 for update in range(1, LAST_UPDATE + 1)]
    assert all("labeled_loss" in line for line in trained)
    parts = [trained[-1][f"kl_{view}"] for view in ("full", "forward", "past", "word_dropout")]
    assert trained[-1]["cvt_loss"] == pytest.approx(sum(parts), abs=3e-4)


def test_one_model_of_two_columns(place, tmp_path):
    folders = [place / "ner" / "data", place / "pos" / "data"]
    test = write_columns(tmp_path / "test.txt", make_sentences(20, seed=2))
    words = ["--data", *folders, "--views", "future,past", "--test", test, *NAMES_OF_COLUMNS]
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
    source = write_columns(tmp_path / "train.txt", make_sentences())
    files = ["--train", source, "--dev", source]
    for flags, message in (
        ([*files, "--unlabeled", source], "only --views learn from these sentences: give --views"),
        (
            ["--data", place / "ner" / "data", "--views", "full", "--set", "unlabeled_start=1"],
            "--unlabeled-start 1.0 must be",
        ),
    ):
        assert message in error_line(capsys, main, "tag", *start, *flags, reports_progress=True), flags
    assert not (tmp_path / "out").exists()
