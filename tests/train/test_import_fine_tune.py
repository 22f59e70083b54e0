"""What `amos import` writes goes into stock fairseq-train: a labelled task from one process, with the flags it printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from hugging_face_folders import LINES, POSITIONS, write_electra
from tiny_runs import ROOT, environment

from amos_fairseq.cli.main import main
from amos_fairseq.interop.checkpoint import load_pretrained, read_state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("import")
    write_electra(root / "hugging_face")
    return root / "imported" / "model.pt"


def write_task(directory: Path, dictionary: Dictionary, rows: list[torch.Tensor]) -> None:
    """The layout of ``sentence_prediction``: label 0 for the first half of the rows, 1 for the others."""
    labels = Dictionary()
    for label in ("no", "yes"):
        labels.add_symbol(label)
    for name, words, lines in (
        ("input0", dictionary, [row[1:] for row in rows]),  # --init-token puts <s> in front
        ("label", labels, [torch.tensor([labels.index(("no", "yes")[i * 2 // len(rows)])]) for i in range(len(rows))]),
    ):
        (directory / name).mkdir(parents=True)
        words.save(str(directory / name / "dict.txt"))
        for split in ("train", "valid"):
            builder = indexed_dataset.make_builder(str(directory / name / f"{split}.bin"), "mmap", len(words))
            for line in lines:
                builder.add_item(line)
            builder.finalize(str(directory / name / f"{split}.idx"))


def test_fairseq_fine_tunes_an_imported_electra(checkpoint, tmp_path, capsys):
    folder = checkpoint.parent.parent / "hugging_face" / "discriminator"
    main(["import", str(folder), str(checkpoint), "--arch", "electra_tiny"])
    flags = re.search(r"flags of fairseq-train that build this model: (.*)", capsys.readouterr().out).group(1).split()
    pretrained = load_pretrained(checkpoint)
    dictionary = Dictionary()
    for symbol in pretrained.tokenizer.dictionary_symbols:
        dictionary.add_symbol(symbol)
    write_task(tmp_path / "data", dictionary, [pretrained.tokens(line) for line in LINES[:8]])
    command = [
        sys.executable, "-m", "fairseq_cli.train", str(tmp_path / "data"), "--user-dir", "amos_fairseq",
        "--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "2", "--init-token", "0",
        "--finetune-from-model", str(checkpoint), *flags, "--optimizer", "adam", "--lr", "0.001", "--lr-scheduler", "fixed",
        "--batch-size", "8", "--max-update", "1", "--num-workers", "0", "--save-dir", str(tmp_path / "run"), "--cpu",
        "--log-format", "simple", "--log-interval", "1", "--no-epoch-checkpoints",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fine-tuning takes the encoder of a pretraining checkpoint" in done.stdout + done.stderr
    before, after = read_state(checkpoint), read_state(tmp_path / "run" / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] == 1
    assert after["cfg"]["model"]["token_types"] == 2
    assert after["cfg"]["model"]["layer_norm_eps"] == before["cfg"]["model"]["layer_norm_eps"] == 1e-12
    # One Adam update of 0.001 moves no weight further: it started from the imported values, not from others.
    for name, value in before["model"].items():
        if name.startswith("discriminator.") and "embed_positions" not in name:
            moved = (after["model"][name.replace("discriminator.", "encoder.")] - value).abs().max()
            assert 0 < moved < 0.0011 or "token_types" in name, name
    assert after["model"]["encoder.embed_positions.weight"].shape[0] == POSITIONS
