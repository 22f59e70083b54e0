"""A forked command against the same command in a new process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_command import fork_server
from tiny_runs import ROOT, TINY_RUN, environment


def test_a_training_leaves_the_bits_of_a_new_process(binarized_corpus: Path, tmp_path: Path) -> None:
    arguments = [str(binarized_corpus), *TINY_RUN, "--max-update", "2", "--save-dir"]
    forked = fork_server().run("fairseq_cli.train", [*arguments, str(tmp_path / "forked")], ROOT)
    assert forked.returncode == 0, forked.stderr
    command = [sys.executable, "-m", "fairseq_cli.train", *arguments, str(tmp_path / "new")]
    new = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert forked.stdout.count("num_updates=") == new.stdout.count("num_updates=") > 0
    assert forked.stderr == new.stderr
    one, other = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("forked", "new")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_exit_code_output_folder_and_variables(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import os, sys\nprint(os.getcwd(), sys.argv[1:], os.environ['COLOR'])\nsys.exit('to stderr')\n",
        encoding="utf-8",
    )
    done = fork_server().run("told", ["a b", "--c"], tmp_path, {"COLOR": "red"})
    assert done.returncode == 1
    assert done.stdout == f"{tmp_path} ['a b', '--c'] red\n"
    assert done.stderr == "to stderr\n"
    (tmp_path / "told.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8")
    assert fork_server().run("told", [], tmp_path).returncode == -9


def test_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nprint('before', flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server().run("sleeps", [], tmp_path, timeout=1)
