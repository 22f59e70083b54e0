"""A forked command against the same command in a new process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_command import fork_server
from tiny_runs import ROOT, TINY_RUN, environment


@pytest.mark.slow
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


@pytest.mark.slow
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


def interpret(arguments: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    command = [fork_server().python, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(variables), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_interpreter_forks_for_modules_of_the_package(tmp_path: Path) -> None:
    """``amos_fairseq`` of the working directory shadows the package, as with ``python -m``."""
    package = tmp_path / "amos_fairseq"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shown.py").write_text(
        "import os, sys\nprint('torch' in sys.modules, sys.executable, sys.argv[1:], os.environ['COLOR'])\nsys.exit(3)\n",
        encoding="utf-8",
    )
    done = interpret(["-u", "-m", "amos_fairseq.shown", "a b"], tmp_path, COLOR="red")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"True {fork_server().python} ['a b'] red\n"
    new = interpret(["-m", "amos_fairseq.shown", "a b"], tmp_path, COLOR="red", OMP_NUM_THREADS="2")
    assert new.stdout == done.stdout.replace("True", "False")


def test_the_interpreter_forwards_signals_and_ends_as_its_command_does(tmp_path: Path) -> None:
    package = tmp_path / "amos_fairseq"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "waits.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    command = [fork_server().python, "-m", "amos_fairseq.waits"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_the_interpreter_is_an_environment_of_its_own_name(tmp_path: Path) -> None:
    shown = "import sys, torch; print(sys.executable)"
    assert interpret(["-c", shown], tmp_path).stdout == f"{fork_server().python}\n"
