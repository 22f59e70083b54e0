"""Ranks that are killed, and launches that would train copies or nothing: both end with one line."""

import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from fairseq import distributed_utils
from interrupted_run import BackgroundRun
from tiny_runs import TINY_RUN

FLAGS = ["--batch-size", "4", "--validate-interval-updates", "0", "--keep-interval-updates", "1"]


def lose_a_rank(killed: int, num_ranks: int, data: Path, save_dir: Path) -> BackgroundRun | None:
    """Kill one rank of a run. Return the run when the others have ended with exit code 1, None if one goes on waiting."""
    flags = [*FLAGS, "--max-update", "1000", "--save-dir", str(save_dir)]
    command = [sys.executable, "-m", "fairseq_cli.train", str(data), *TINY_RUN, *flags]
    run = BackgroundRun(command, save_dir.with_suffix(".log"), num_ranks)
    run.wait_for_update(3)
    os.killpg(run.ranks[killed].pid, signal.SIGKILL)
    try:
        assert {run.ranks[rank].wait(60) for rank in range(num_ranks) if rank != killed} == {1}
        return run
    except subprocess.TimeoutExpired:
        warnings.warn(f"a rank was still waiting a minute after the loss of rank {killed}", stacklevel=2)
        return None
    finally:
        for rank in run.ranks:
            rank.kill_group()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "killed"), [(3, 1), (2, 0)])
def test_the_others_end_in_one_line_when_a_rank_was_killed(num_ranks, killed, binarized_corpus, tmp_path) -> None:
    """Ranks that were started without torchrun, whose agent would end the others. With the first one their store is lost.

    In 1 of 60 trials of gloo's all-reduce alone (three ranks, torch 2.13) one missed the loss and waited: for that there is a
    second run, with a warning.
    """
    runs = (lose_a_rank(killed, num_ranks, binarized_corpus, tmp_path / name) for name in ("first", "second"))
    run = next((run for run in runs if run is not None), None)
    assert run is not None, "a rank was still waiting after a minute, in both runs"
    others = [rank for rank in range(num_ranks) if rank != killed]
    text = run.errors.read_text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == len(others)
    assert all("another rank has ended or cannot be reached" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "env", "line"),
    [
        (["--distributed-world-size", "2"], {}, r"would train nothing: start it with 'torchrun --nproc-per-node 2"),
        ([], {"WORLD_SIZE": "2"}, r"WORLD_SIZE is in the environment without torchrun"),
        (["--fp16"], {}, r"--fp16 needs a GPU"),
        (["--update-freq", "5000"], {}, r"train has \d+ blocks, fewer than the 80000"),
        (["--tokens-per-sample", "64"], {}, r"--max-positions 32 has no room"),
    ],
)
def test_refused_launches(flags, env, line, binarized_corpus, tmp_path, monkeypatch, refused_training) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    arguments = [binarized_corpus, *TINY_RUN, "--distributed-world-size", "1", "--save-dir", tmp_path / "run", *flags]
    assert re.search(line, refused_training(*arguments))
    assert [path.name for path in (tmp_path / "run").rglob("*")] in ([], [".lock"]), "something was written"
    assert not distributed_utils.dist.is_initialized()
