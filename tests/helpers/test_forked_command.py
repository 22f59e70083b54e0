"""A forked command against the same command in a new process."""

import sys
from pathlib import Path

import pytest
import torch
from forked_command import run_module
from tiny_runs import TINY_RUN, environment, run_process


@pytest.mark.by_hand
def test_a_training_leaves_the_bits_of_a_new_process(binarized_corpus: Path, tmp_path: Path) -> None:
    arguments = [str(binarized_corpus), *TINY_RUN, "--max-update", "2", "--num-workers", "1", "--save-dir"]
    quiet = {"PYTHONWARNINGS": "ignore"}  # those of imports were printed when the server of the forks started
    forked = run_module("fairseq_cli.train", [*arguments, str(tmp_path / "forked")], env=quiet)
    assert forked.returncode == 0, forked.stderr
    command = [sys.executable, "-m", "fairseq_cli.train", *arguments, tmp_path / "new"]
    new = run_process(command, env=environment(quiet))
    assert forked.stdout.count("num_updates=") == new.stdout.count("num_updates=") > 0
    assert forked.stderr == new.stderr
    one, other = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("forked", "new")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
