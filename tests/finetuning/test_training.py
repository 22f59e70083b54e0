"""The process of a training, with short programs instead of fairseq-train: exit code, error, lock, progress."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest
from forked_command import start_module
from tiny_runs import ROOT

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Stopped
from amos_fairseq.finetuning.training import RunFailed, environment, train


def python(code):
    return [sys.executable, "-c", code]


def run(command, directory, stop=None, report=print):
    train(command, directory, dict(os.environ), stop or threading.Event(), report)


def test_output_is_appended_to_the_log_and_progress_is_reported(tmp_path):
    (tmp_path / "train.log").write_text("earlier\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"split": "train", "update": 12}) + "\n")
    reports = []
    run(python("import time; print('out', flush=True); time.sleep(0.7)"), tmp_path, report=reports.append)
    assert (tmp_path / "train.log").read_text() == "earlier\nout\n"
    assert set(reports) == {12}


def test_a_log_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "train.log").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"train\.log is a link"):
        run(python("print('out')"), tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_error_is_the_last_line_of_this_attempt(tmp_path):
    (tmp_path / "train.log").write_text("amos_fairseq: error: of an earlier attempt\n")
    with pytest.raises(RunFailed, match=r"^ZeroDivisionError: division by zero$"):
        run(python("1 / 0"), tmp_path)
    with pytest.raises(RunFailed, match=r"^the disk is full$"):
        run(python("print('amos_fairseq: error: the disk is full'); print('bye'); raise SystemExit(1)"), tmp_path)
    with pytest.raises(RunFailed, match="ended by SIGKILL from outside"):
        run(python("import os; os.kill(os.getpid(), 9)"), tmp_path)


def test_stopping_sends_sigterm_and_waits(tmp_path):
    stop = threading.Event()
    code = (
        "import signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', flush=True); time.sleep(60)"
    )

    def stop_when_ready(updates):
        if "ready" in (tmp_path / "train.log").read_text():
            stop.set()

    with pytest.raises(Stopped):
        run(python(code), tmp_path, stop, stop_when_ready)
    assert (tmp_path / "train.log").read_text() == "ready\nsaved\n"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_second_training_in_one_directory_is_refused(tmp_path):
    """As when the command was killed and repeated while its training still runs."""
    first = threading.Thread(target=run, args=(python("import time; print(1, flush=True); time.sleep(1)"), tmp_path))
    first.start()
    while not (tmp_path / "train.process").exists() or not (tmp_path / "train.log").read_text():
        time.sleep(0.01)
    with pytest.raises(RunFailed, match=rf"^process \d+ on {socket.gethostname()} is training in {tmp_path}: wait "):
        run(python("print(2)"), tmp_path)
    first.join()
    run(python("print(3)"), tmp_path)
    assert (tmp_path / "train.log").read_text() == "1\n3\n"
    assert not (tmp_path / "train.process").exists()


def test_a_training_saves_and_ends_when_its_parent_is_killed(tmp_path):
    """SIGKILL leaves the parent no time to stop its child."""
    (tmp_path / "child.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', repr(sys.stdin.read()), flush=True); time.sleep(60)"
    )
    (tmp_path / "parent.py").write_text(
        "import os, pathlib, threading\n"
        "from amos_fairseq.finetuning.training import python_command, train\n"
        "train(python_command('child', with_parent=True), pathlib.Path(), dict(os.environ), threading.Event(), print)"
    )
    log, variables = tmp_path / "train.log", {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    parent = start_module("parent", [], tmp_path, tmp_path / "out", tmp_path / "err", variables)
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: "saved" in log.read_text())
    message = "amos_fairseq: the command that started this process has ended: stopping"
    assert log.read_text().splitlines() == ["ready ''", message, "saved"]


def test_run_has_its_own_gpu_and_no_launcher(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    variables = environment("cuda:1", 2)
    assert variables["CUDA_VISIBLE_DEVICES"] == "5"
    assert "WORLD_SIZE" not in variables


def test_run_on_the_cpu_has_no_gpu(monkeypatch):
    """fairseq uses the number of visible GPUs as the number of ranks, and refuses it with ``--cpu``."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""


def test_runs_on_the_cpu_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment("cpu", 3)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment("cpu", 3)["OMP_NUM_THREADS"] == "7"
