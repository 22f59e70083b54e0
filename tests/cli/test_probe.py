"""``amos probe`` on an untrained model: its files and refusals."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from failures import error_line
from saved_models import write_run

from amos_fairseq.cli.main import main
from amos_fairseq.probing import probe as probing
from amos_fairseq.probing.probe import read_probe_results

FLAGS = ["--updates", "4"]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "a", "end"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two tasks on the same texts."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for split, size in {"train": 30, "valid": 8, "test": 9}.items():
        texts = [draw.choices(WORDS, k=5) for _ in range(size)]
        for task in ("pos", "relations"):
            lines = []
            for words in texts:
                label = "noun" if words[0] in ("fox", "dog", "end") else "other"
                spans = {"span1": [0, 1]} | ({"span2": [1, 4]} if task == "relations" else {})
                targets = [spans | {"label": label}]
                lines.append(json.dumps({"text": " ".join(words), "targets": targets}) + "\n")
            (folder / task).mkdir(exist_ok=True)
            (folder / task / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def probe(run: Path, data: Path, out: Path, *flags: str) -> None:
    main(["probe", "--checkpoint", str(run), "--data", str(data), "--out", str(out), *FLAGS, *flags])


def test_every_layer_has_a_result(run: Path, data: Path, tmp_path: Path):
    out = tmp_path / "out"
    probe(run, data, out, "--seeds", "2")
    content = read_probe_results(out)
    found = [(result.task, result.layer, result.seed) for result in content.results]
    layers = ["generator 1", "generator 2", "generator 4", "discriminator 2"]
    seeds = [(layer, seed) for layer in layers for seed in (1, 2)] + [("most frequent label", 0)]
    assert found == [(task, *seed) for task in ("pos", "relations") for seed in seeds]
    assert all(0 <= result.score <= 1 and result.targets == 9 for result in content.results)
    assert {path.name for path in out.iterdir()} == {"results.json", "table.md"}
    table = (out / "table.md").read_text(encoding="utf-8")
    assert re.search(r"\| generator 1 \| \d+\.\d ± \d+\.\d \|", table)


def test_nothing_is_left_of_a_command_that_fails(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After the first probe; the same command then gives the results of one that never failed, bit for bit."""
    trained, train_probe = [], probing.train_probe

    def fail_at_the_second(*args):
        if trained:
            raise KeyError("stopped")
        trained.append(args)
        return train_probe(*args)

    flags = ["--part", "generator", "--layers", "1,4"]
    with monkeypatch.context() as patch:
        patch.setattr(probing, "train_probe", fail_at_the_second)
        with pytest.raises(KeyError):
            probe(run, data, tmp_path / "out", *flags)
    assert list(tmp_path.iterdir()) == []
    for name in ("out", "again"):
        probe(run, data, tmp_path / name, *flags)
    assert read_probe_results(tmp_path / "out") == read_probe_results(tmp_path / "again")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--part", "encoder"], "no part 'encoder': give --part some of generator, discriminator"),
        (["--layers", "4"], "discriminator has no layer 4"),
        (["--tasks", "ner"], "no task 'ner'"),
        (["--seeds", "0"], "--seeds: 0 must be at least 1"),
        (["--lr", "1e300"], "--lr: 1e300 must be at least 1e-09 and at most 1,000"),
        (["--device", "cuda:99"], "device cuda:99 cannot be used"),
        (["--out", "/"], "--out / exists: give another directory"),
    ],
)
def test_mistakes_are_one_line(run: Path, data: Path, tmp_path: Path, capsys, flags: list[str], reason: str):
    arguments = ["probe", "--checkpoint", run, "--data", data, "--out", tmp_path / "out", *flags]
    assert reason in error_line(capsys, main, *arguments, reports_progress=True)
    assert not (tmp_path / "out").exists()


def test_scores_on_the_validation_split_are_named(run: Path, data: Path, tmp_path: Path, capsys):
    """Without test.jsonl; and a text beyond the model's length, in another task, is refused before any training."""
    shutil.copytree(data, tmp_path / "data")
    for task in ("pos", "relations"):
        (tmp_path / "data" / task / "test.jsonl").unlink()
    flags = ["--part", "discriminator", "--layers", "2"]
    probe(run, tmp_path / "data", tmp_path / "out", *flags, "--tasks", "pos")
    assert "pos: no test split; scored on the validation split" in capsys.readouterr().out
    notes = read_probe_results(tmp_path / "out").notes
    assert "pos: no test split; scored on the validation split, like the choice of weights" in notes

    target = {"span1": [4999, 5000], "span2": [0, 1], "label": "other"}
    text = json.dumps({"text": "the " * 5000, "targets": [target]}) + "\n"
    (tmp_path / "data" / "relations" / "test.jsonl").write_text(text, encoding="utf-8")
    arguments = ["probe", "--checkpoint", run, "--data", tmp_path / "data", "--out", tmp_path / "new", *FLAGS, *flags]
    line = error_line(capsys, main, *arguments, reports_progress=True)
    assert "relations: none of the 1 targets in test is within the tokens" in line
    assert not (tmp_path / "new").exists()
