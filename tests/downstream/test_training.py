"""The process of a training, with short programs instead of fairseq-train: exit code, error, lock, progress."""

import json
import os
import signal
import socket
import sys
import threading

import pytest
from forked_command import ForkedCommand
from tiny_runs import ROOT
from waiting import wait_until

from amos_fairseq.downstream.benchmark import Stopped
from amos_fairseq.downstream.training import RunFailed, environment, start_process, train
from amos_fairseq.errors import UserError
from amos_fairseq.python_process import ForkServer, python_command


def python(code):
    return [sys.executable, "-c", code]


def run(command, directory, stop=None, report=print, start=start_process):
    train(command, directory, dict(os.environ), stop or threading.Event(), report, start)


def test_output_is_appended_to_the_log_and_progress_is_reported(tmp_path):
    (tmp_path / "train.log").write_text("earlier\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"split": "train", "update": 12}) + "\n")
    reports = []
    record = {"split": "valid", "update": 15, "accuracy": 50.0}
    append = f"open('metrics.jsonl', 'a').write({json.dumps(record)!r} + chr(10))"
    code = f"import os, time; print('out', flush=True); time.sleep(0.7); os.chdir({str(tmp_path)!r}); {append}"
    run(python(code), tmp_path, report=lambda *arguments: reports.append(arguments))
    assert (tmp_path / "train.log").read_text() == "earlier\nout\n"
    assert reports[0] == (12, [])
    assert reports[-1][0] == 15  # written just before the end
    assert [found for _, records in reports for found in records] == [record]


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

    def stop_when_ready(*progress):
        if "ready" in (tmp_path / "train.log").read_text():
            stop.set()

    with pytest.raises(Stopped):
        run(python(code), tmp_path, stop, stop_when_ready)
    assert (tmp_path / "train.log").read_text() == "ready\nsaved\n"


@pytest.fixture
def server():
    with ForkServer(["decimal"], os.environ, threading.Event()) as server:
        yield server


def write_module(tmp_path, monkeypatch, code):
    """Write a program that can be started by its name, outside of the server's path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "program.py").write_text(code)
    return python_command("program", with_parent=True)


def test_a_forked_process_is_as_a_new_one_and_has_the_imports_of_the_server(tmp_path, monkeypatch, server):
    """Two at a time, each with variables of its own, in sessions of their own."""
    code = """
import atexit, os, sys
print("imported" if "decimal" in sys.modules else "not imported")
atexit.register(lambda: print("at exit"))
print(os.environ["OWN"], os.getcwd(), sys.argv[1:], __name__, os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/fd")))
sys.exit(int(os.environ["OWN"]))
"""
    command = write_module(tmp_path, monkeypatch, code)
    monkeypatch.chdir(tmp_path)
    logs, processes = [], []
    for start in (server.start, start_process):
        for own in ("3", "4"):
            logs.append(open(tmp_path / f"log{len(logs)}", "ab"))  # noqa: SIM115
            processes.append(start([*command, "a b", "\udcff"], {**os.environ, "OWN": own}, logs[-1]))
    assert [process.wait(30) for process in processes] == [3, 4, 3, 4]
    for file in (*logs, *(process.stdin for process in processes)):
        file.close()
    for index, own in enumerate(("3", "4")):
        (first, *forked), (other, *new) = ((tmp_path / f"log{i}").read_text().splitlines() for i in (index, index + 2))
        assert (first, other) == ("imported", "not imported")
        assert forked == new
        assert forked[0].startswith(f"{own} {tmp_path} ['a b', '\\udcff'] __main__ True ")
        assert forked[1:] == ["at exit"]


def test_errors_signals_and_stopping_of_a_forked_process(tmp_path, monkeypatch, server):
    for code, message in (
        ("1 / 0", r"^ZeroDivisionError: division by zero$"),
        ("print('amos_fairseq: error: the disk is full'); raise SystemExit(1)", r"^the disk is full$"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL from outside"),
    ):
        command = write_module(tmp_path, monkeypatch, code)
        with pytest.raises(RunFailed, match=message):
            run(command, tmp_path, start=server.start)
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True)\n"
    )
    command, stop = write_module(tmp_path, monkeypatch, code + "time.sleep(60)"), threading.Event()

    def stop_when_ready(*progress):
        if "ready" in (tmp_path / "train.log").read_text():
            stop.set()

    with pytest.raises(Stopped):
        run(command, tmp_path, stop, stop_when_ready, server.start)


def test_after_a_server_was_killed_its_training_saves_and_the_next_one_has_a_new_server(tmp_path, monkeypatch, server):
    code = "import signal, sys, time\ndef save(*_): print('saved', flush=True); sys.exit(75)\n"
    code += "signal.signal(signal.SIGTERM, save); print('ready', flush=True); time.sleep(60)"
    command, log = write_module(tmp_path, monkeypatch, code), tmp_path / "train.log"

    def kill_when_ready(*progress):
        if "ready" in log.read_text():
            server._processes[-1]._process.kill()

    with pytest.raises(
        RunFailed, match=r"^the process that starts trainings has ended with exit code -9 \(no output\)$"
    ):
        run(command, tmp_path, report=kill_when_ready, start=server.start)
    wait_until(lambda: "saved" in log.read_text())
    for name in ("next", "last"):  # with one new server
        (tmp_path / name).mkdir()
        run(
            [*write_module(tmp_path, monkeypatch, "import sys; print(*sys.argv[1:])"), name],
            tmp_path / name,
            start=server.start,
        )
        assert (tmp_path / name / "train.log").read_text() == f"{name}\n"
    assert len(server._processes) == 2


def test_a_process_of_a_killed_server_is_not_asked_of_the_next_one(tmp_path, monkeypatch, server):
    command = write_module(tmp_path, monkeypatch, "print('out')")
    with open(tmp_path / "log", "ab") as log:
        first = server.start(command, os.environ, log)
        server._processes[-1]._process.kill()
        wait_until(server._processes[-1].has_ended)
        second = server.start(command, os.environ, log)
        with pytest.raises(ChildProcessError, match="exit code -9"):
            first.poll()
        assert second.wait(30) == 0
        for process in (first, second):
            process.stdin.close()


def test_imports_that_fail_are_reported_at_each_training(tmp_path):
    with ForkServer(["no_such_module"], os.environ, threading.Event()) as broken:
        for _ in range(2):
            with pytest.raises(
                RunFailed, match=r"exit code 1 \(ModuleNotFoundError: No module named 'no_such_module'\)$"
            ):
                run(python_command("program"), tmp_path, start=broken.start)


def test_stopping_does_not_wait_for_imports(tmp_path, monkeypatch):
    """Two trainings wait for the server, which would never answer."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hangs.py").write_text(
        "import pathlib, signal; pathlib.Path(__file__).with_name('begun').touch(); signal.pause()"
    )
    stop, results = threading.Event(), []

    def train_in(directory):
        directory.mkdir()
        with pytest.raises(Stopped):
            run(python_command("program"), directory, stop, start=server.start)
        results.append(directory.name)

    with ForkServer(["hangs"], os.environ, stop) as server:
        threads = [threading.Thread(target=train_in, args=[tmp_path / name], daemon=True) for name in "ab"]
        for thread in threads:
            thread.start()
        wait_until((tmp_path / "begun").exists)
        stop.set()
        wait_until(lambda: len(results) == 2)
        assert len(server._processes) == 1


def test_second_training_in_one_directory_is_refused(tmp_path):
    """As when the command was killed and repeated while its training still runs."""
    end = tmp_path / "end"
    code = (
        f"import pathlib, time; print(1, flush=True)\nwhile not pathlib.Path({str(end)!r}).exists(): time.sleep(0.02)"
    )
    first = threading.Thread(target=run, args=(python(code), tmp_path))
    first.start()
    try:
        wait_until(lambda: (tmp_path / "train.process").exists() and (tmp_path / "train.log").read_text())
        with pytest.raises(
            RunFailed, match=rf"^process \d+ on {socket.gethostname()} is training in {tmp_path}: wait "
        ):
            run(python("print(2)"), tmp_path)
    finally:
        end.touch()
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
        "from amos_fairseq.downstream.training import python_command, train\n"
        "from amos_fairseq.python_process import ForkServer\n"
        "train(python_command('child', with_parent=True), pathlib.Path(), dict(os.environ), threading.Event(), print,\n"
        "      ForkServer(['json'], os.environ, threading.Event()).start)"
    )
    log, variables = tmp_path / "train.log", {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    parent = ForkedCommand("parent", [], tmp_path, tmp_path / "out", tmp_path / "err", env=variables)
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
