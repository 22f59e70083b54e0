"""``examples/hugging_face/continue.sh``: import, corpus and training of a released model by one command."""

import shutil
from pathlib import Path

import pytest
import torch
from hugging_face_folders import LINES, write_electra
from shell_scripts import run_script
from tiny_runs import ROOT

from amos_fairseq.checkpoints.read import read_state

SCRIPT = "examples/hugging_face/continue.sh"
FLAGS = ("2", "--tokens-per-sample", "32", "--batch-size", "4", "--num-workers", "0")
FLOAT32 = ("--precision", "float32")


@pytest.mark.slow
def test_both_networks_are_trained_and_the_same_command_imports_nothing(tmp_path: Path) -> None:
    """The same command is run with commands that only say how they were called."""
    write_electra(tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(LINES * 4), encoding="utf-8")
    arguments = (SCRIPT, tmp_path, tmp_path / "discriminator", text, out, *FLAGS)
    # An import that was interrupted, by this command and by another one.
    (out / "imported").mkdir(parents=True)
    (out / "imported" / "model.pt").write_text("a part of a file", encoding="utf-8")
    refused = run_script(*arguments, *FLOAT32, GENERATOR=str(tmp_path / "generator"))
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("imported is not from this command: give another OUT")
    (out / "imported" / "flags.new").touch()

    done = run_script(*arguments, *FLOAT32, GENERATOR=str(tmp_path / "generator"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    last = out / "run" / "checkpoint_last.pt"
    trained, imported = (read_state(file)["model"] for file in (last, out / "imported" / "model.pt"))
    assert trained.keys() == imported.keys()
    for network in ("discriminator.", "generator."):
        name = f"{network}layers.0.ffn_in.weight"
        change = (trained[name] - imported[name]).abs().max()
        assert 0 < change < 1e-3, name  # two updates at a rate of 5e-5 and less
    assert not torch.equal(trained["embed_tokens.weight"], imported["embed_tokens.weight"])

    for folder in ("examples", "preprocess"):
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder, ignore=shutil.ignore_patterns("pretraining"))
    shutil.copyfile(ROOT / "setup.py", tmp_path / "checkout/setup.py")
    (tmp_path / "checkout/preprocess/pretraining").mkdir()
    for program in ("preprocess/pretraining/prepare.sh", "examples/commands/amos", "examples/commands/fairseq-train"):
        path = tmp_path / "checkout" / program
        path.unlink(missing_ok=True)
        path.write_text('#!/bin/sh\necho "called: ${0##*/} $*"\n', encoding="utf-8")
        path.chmod(0o755)
    again = run_script(str(tmp_path / "checkout" / SCRIPT), *arguments[1:], PREPARE="--document line")
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    prepared, trained_again = (line for line in again.stdout.splitlines() if line.startswith("called: "))
    assert prepared.startswith(
        f"called: prepare.sh {text} --out {out}/data --tokenizer {out}/imported/tokenizer --document line"
    )
    assert trained_again.startswith(f"called: fairseq-train {out}/data ")
    assert "--precision auto --tokens-per-sample 32" in trained_again
