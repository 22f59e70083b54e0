"""A forked command against the same command in a new process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_command import run_module, start_module
from tiny_runs import ROOT, TINY_RUN, environment

pytestmark = pytest.mark.slow


def test_a_training_leaves_the_bits_of_a_new_process(binarized_corpus: Path, tmp_path: Path) -> None:
    arguments = [str(binarized_corpus), *TINY_RUN, "--max-update", "2", "--num-workers", "1", "--save-dir"]
    forked = run_module("fairseq_cli.train", [*arguments, str(tmp_path / "forked")])
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


ENDS = {
    "sys.exit('to stderr')": (1, "to stderr\n"),
    "sys.exit(3)": (3, ""),
    "pass": (0, ""),
    "os.kill(os.getpid(), signal.SIGKILL)": (-signal.SIGKILL, ""),
    "raise KeyboardInterrupt": (-signal.SIGINT, ""),
    "import atexit; atexit.register(print, 'last', file=sys.stderr)": (0, "last\n"),
}


@pytest.mark.parametrize("statement", ENDS)
def test_exit_code_output_folder_and_variables(statement: str, tmp_path: Path) -> None:
    told = "import os, signal, sys\nprint(os.getcwd(), sys.argv[1:], os.environ['COLOR'], flush=True)\n" + statement
    (tmp_path / "told.py").write_text(told, encoding="utf-8")
    done = run_module("told", ["a b", "--c"], tmp_path, {"COLOR": "red"})
    assert done.stdout == f"{tmp_path} ['a b', '--c'] red\n"
    assert (done.returncode, done.stderr) == ENDS[statement]


def test_a_command_that_hangs_is_killed_and_signals_arrive(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nprint('before', flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    with pytest.raises(subprocess.TimeoutExpired):
        run_module("sleeps", [], tmp_path, timeout=1)
    process = start_module("sleeps", [], tmp_path, tmp_path / "out", tmp_path / "err")
    while not (tmp_path / "out").read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
