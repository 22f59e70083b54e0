"""The process of a training, with short programs instead of fairseq-train: exit code, error, progress, and its end."""

import json
import multiprocessing
import os
import signal
import threading

import pytest
from forked_command import IMPORTED, ForkedCommand
from tiny_runs import ROOT, wait_until

from amos_fairseq.errors import IN_OUT, one_line, save_dir_not_writable
from amos_fairseq.experiments.benchmark import RunFailed, Stopped
from amos_fairseq.experiments.runner import environment, train

SAVES = """\
import signal, sys, time
def save(*_): print("saved", flush=True); sys.exit(75)
signal.signal(signal.SIGTERM, save); print("ready", repr(sys.stdin.read()), flush=True); time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train in ``tmp_path``: a program outside of the path of the server that forks it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    (tmp_path / "programs").mkdir()
    multiprocessing.set_forkserver_preload(IMPORTED)

    def run(code, stop=None, report=print, arguments=()):
        (tmp_path / "programs" / "program.py").write_text(code)
        train(["program", *arguments], tmp_path, dict(os.environ), stop or threading.Event(), report)

    return run


def test_output_is_appended_to_the_log_and_progress_is_reported(tmp_path, run):
    (tmp_path / "train.log").write_text("earlier\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"split": "train", "update": 12}) + "\n")
    reports = []
    record = {"split": "valid", "update": 15, "accuracy": 50.0}
    append = f"open('metrics.jsonl', 'a').write({json.dumps(record)!r} + chr(10))"
    code = f"import os, time; print('out', flush=True); time.sleep(0.7); os.chdir({str(tmp_path)!r}); {append}"
    run(code, report=lambda *arguments: reports.append(arguments))
    assert (tmp_path / "train.log").read_text() == "earlier\nout\n"
    assert reports[0] == (12, [])
    assert reports[-1][0] == 15  # written just before the end
    assert [found for _, records in reports for found in records] == [record]


def test_error_is_the_last_line_of_this_attempt(tmp_path, run):
    (tmp_path / "train.log").write_text("amos_fairseq: error: of an earlier attempt\n")
    for code, message in (
        ("1 / 0", r"^ZeroDivisionError: division by zero$"),
        ("print('amos_fairseq: error: the disk is full'); print('bye'); raise SystemExit(1)", r"^the disk is full$"),
        ("import os; os.kill(os.getpid(), 9)", "^ended by SIGKILL, perhaps because memory was full$"),
        ("import os; os.kill(os.getpid(), 11)", "^ended by SIGSEGV$"),
        ("import os; os.kill(os.getppid(), 9); os._exit(0)", "^the process that starts trainings was killed$"),
    ):
        with pytest.raises(RunFailed, match=message):
            run(code)


def test_stopping_sends_sigterm_and_waits(tmp_path, run):
    stop = threading.Event()

    def stop_when_ready(*progress):
        if "ready" in (tmp_path / "train.log").read_text():
            stop.set()

    with pytest.raises(Stopped):
        run(SAVES, stop, stop_when_ready)
    assert (tmp_path / "train.log").read_text() == "ready ''\nsaved\n"


def test_a_training_is_as_a_new_process(tmp_path, run, monkeypatch):
    """Variables, arguments, folder, session, open files; nothing is imported from the current folder."""
    (tmp_path / "json.py").write_text("print('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN", "3")
    code = """
import atexit, json, os, sys
atexit.register(lambda: print("at exit"))
print(os.environ["OWN"], os.getcwd(), sys.argv[1:], __name__, os.getsid(0) == os.getpid())
print("" in sys.path, os.getcwd() in sys.path)
"""
    run(code, arguments=["a b", "\udcff"])
    expected = f"3 {tmp_path} ['a b', '\\udcff'] __main__ True\nFalse False\nat exit\n"
    assert (tmp_path / "train.log").read_text() == expected


def test_a_training_saves_and_ends_when_its_parent_is_killed(tmp_path):
    """SIGKILL leaves the parent no time to stop its child."""
    (tmp_path / "child.py").write_text(SAVES)
    (tmp_path / "parent.py").write_text(
        "import os, pathlib, threading\n"
        "from amos_fairseq.experiments.runner import train\n"
        "if __name__ == '__main__':  # multiprocessing imports the main module in each process\n"
        "    train(['child'], pathlib.Path(), dict(os.environ), threading.Event(), print)"
    )
    log, variables = tmp_path / "train.log", {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    parent = ForkedCommand("parent", [], tmp_path, tmp_path / "out", tmp_path / "err", env=variables)
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: "saved" in log.read_text())
    message = "amos_fairseq: the command that started this process has ended: stopping"
    assert log.read_text().splitlines() == ["ready ''", message, "saved"]


def test_variables_of_a_training(monkeypatch):
    """Its own GPU, or none: fairseq takes the number of visible GPUs as that of ranks, and refuses them with ``--cpu``. No
    launcher. On the CPU the cores are shared, unless their number is given. Errors name the option of the command."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))  # of a machine that may have more
    assert environment("cuda:1", 2)["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert "WORLD_SIZE" not in environment("cuda:1", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment("cpu", 3)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment("cpu", 3)["OMP_NUM_THREADS"] == "7"
    error = save_dir_not_writable("out/run", PermissionError(13, "Permission denied"))
    assert one_line(str(error)).endswith("permit writing, or give another --save-dir (checkpoint.save_dir)")
    for name in IN_OUT:
        monkeypatch.setenv(name, environment("cpu", 1)[name])
    assert one_line(str(error)).endswith("permit writing, or give another --out")
