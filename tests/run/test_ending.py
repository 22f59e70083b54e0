"""Errors of stock fairseq, a loader process and Hydra, and the line that reports each; signals to ranks, launchers and loader
processes."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from fairseq import checkpoint_utils, optim
from fairseq.data import Dictionary, NestedDictionaryDataset, RawLabelDataset
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from amos_fairseq.errors import INTERRUPTED, REQUEUE, UserError
from amos_fairseq.run import ending
from amos_fairseq.run.ending import exit_on_mistake, line_for


def test_errors_that_stock_fairseq_raises(tmp_path: Path) -> None:
    """Files that are missing, an optimizer that is not named, a row of a stock task that is longer than the model reads."""
    missing = str(tmp_path / "dict.txt")
    task = MaskedLMTask(OmegaConf.create({"data": str(tmp_path), "mask_whole_words": False}), Dictionary())
    rows = NestedDictionaryDataset({"id": RawLabelDataset([0])}, sizes=[numpy.array([374])])
    for call, line in (
        (lambda: Dictionary.load(missing), f"{missing}: No such file or directory"),
        (lambda: task.load_dataset("valid"), f"Dataset not found: valid ({tmp_path}/valid)"),
        (lambda: optim.build_optimizer(None, []), "optimizer is required!"),
        (
            lambda: FairseqTask(None).filter_indices_by_size(numpy.arange(1), rows, 128),
            "Size of sample #0 is invalid (=374) since max_positions=128",
        ),
        (lambda: int("x"), None),  # of another library: it keeps its traceback
        (lambda: torch.ones(2).view(3), None),
    ):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            call()
        found = line_for(raised.value)
        assert found is None if line is None else found.startswith(line)


FULL, TOO_LONG = os.strerror(errno.ENOSPC), os.strerror(errno.ENAMETOOLONG)


class Corpus(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise UserError("block 3 of train.bin holds token 900, but the dictionary ends at 400")


def test_an_error_in_a_loader_process() -> None:
    with pytest.raises(UserError, match="Traceback") as raised:
        next(iter(torch.utils.data.DataLoader(Corpus(), num_workers=1)))
    assert line_for(raised.value) == "block 3 of train.bin holds token 900, but the dictionary ends at 400"


NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "memory is full (DataLoader worker"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has"), "--update-freq"),
        (
            RuntimeError(NO_MEMORY),
            "allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)): lower --batch-size",
        ),
        (OSError(errno.ENOSPC, FULL, "a/events"), f"a/events cannot be written ({FULL}): make room, then start again"),
        (OSError(errno.ENAMETOOLONG, TOO_LONG, "DATA/dict.txt"), f"DATA/dict.txt: {TOO_LONG}"),
    ],
)
def test_messages_of_fairseq_and_torch(error: Exception, message: str) -> None:
    assert message in line_for(error)
    assert len(line_for(error).splitlines()) == 1


def test_one_line_and_exit_code_one(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended, exit_on_mistake():
        raise UserError("two\n lines")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "amos_fairseq: error: two lines\n"
    with pytest.raises(ZeroDivisionError), exit_on_mistake():
        1 / 0  # noqa: B018
    assert capsys.readouterr().err == ""


def test_hydra_reports_a_user_error_as_one_line(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        JobReturn(status=JobStatus.FAILED, _return_value=UserError("no such corpus")).return_value  # noqa: B018
    assert ended.value.code == 1
    assert capsys.readouterr().err == "amos_fairseq: error: no such corpus\n"
    with pytest.raises(KeyError):
        JobReturn(status=JobStatus.FAILED, _return_value=KeyError("bug")).return_value  # noqa: B018
    assert JobReturn(status=JobStatus.COMPLETED, _return_value=0.5).return_value == 0.5


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves no received signal and the handlers of the test runner."""
    with ending.handled():
        yield


def alone(updates: int = 5) -> Any:
    task = SimpleNamespace(cfg=SimpleNamespace())
    return SimpleNamespace(data_parallel_world_size=1, get_num_updates=lambda: updates, task=task)


@pytest.mark.parametrize("number", ending.SIGNALS)
def test_a_rank_records_the_signal(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    ending.install_handlers()
    ending.Signals().before_epoch(None, None)
    assert ending.Signals().due(alone()) == (None, False)
    os.kill(os.getpid(), number)
    assert ending.Signals().due(alone()) == ({signal.SIGINT: INTERRUPTED}.get(number, REQUEUE), False)


def test_nohup_keeps_its_effect() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ending.install_handlers()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_ctrl_c_before_the_first_update_ends_at_once(capfd: pytest.CaptureFixture) -> None:
    ending.install_handlers()
    with pytest.raises(SystemExit) as ended, exit_on_mistake():
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.code == INTERRUPTED
    assert capfd.readouterr().err.splitlines() == ["", "amos_fairseq: interrupted: nothing was saved"]


def press_twice(seconds_between: float) -> None:
    ending.install_handlers()
    ending.Signals().before_epoch(None, None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        ending._interrupted_at[0] -= seconds_between
    sys.exit(ending.Signals().due(alone())[0])


@pytest.mark.parametrize(("seconds", "code"), [(0.0, INTERRUPTED), (2.0, -signal.SIGINT)])
def test_a_second_ctrl_c_ends_at_once(seconds: float, code: int, capfd: pytest.CaptureFixture) -> None:
    """But not the copy of the first one that a launcher sends."""
    process = multiprocessing.get_context("fork").Process(target=press_twice, args=(seconds,))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert capfd.readouterr().err.count("Ctrl-C: finishing this update and saving") == 1


def wait_for_signal(ready: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ending.SIGNALS)
    ready.set()
    sys.exit(100 + signal.sigwait(ending.SIGNALS))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_launcher_passes_the_signal_on_to_its_ranks(number: int) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    rank = context.Process(target=wait_for_signal, args=(ready,))
    rank.start()
    assert ready.wait(30)
    ending.note_signal(number, None)
    rank.join(30)
    assert rank.exitcode == 100 + number


class SlowNumbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def test_a_loader_process_ignores_signals_of_other_processes() -> None:
    """As a scheduler sends them: the sender is not the loader's own rank."""
    ending.install_handlers()
    batches = iter(torch.utils.data.DataLoader(SlowNumbers(), num_workers=1, multiprocessing_context="fork"))
    first = int(next(batches))
    pid = batches._workers[0].pid
    for number in ending.SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)
    assert [first, *(int(batch) for batch in batches)] == list(range(6))


@pytest.mark.parametrize(
    ("settings", "saved_at", "expected"),
    [
        ({}, None, 1),
        ({}, 5, 0),  # this update has just been saved
        ({"no_last_checkpoints": True}, 5, 1),  # but not as checkpoint_last.pt
        ({"no_save": True}, None, 0),
    ],
)
def test_checkpoint_before_the_exit(settings: dict, saved_at: Any, expected: int, monkeypatch) -> None:
    trainer, hook, saves = alone(updates=5), ending.Signals(), []
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", lambda *args: saves.append(args))
    if saved_at is not None:
        hook.after_save(alone(updates=saved_at))
    saving = {"restore_file": "checkpoint_last.pt", "no_save": False, "no_last_checkpoints": False, **settings}
    cfg = OmegaConf.create({"checkpoint": saving})
    arguments = (cfg, trainer, "position", False)
    hook.update_completed(*arguments)
    ending._received.append(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        hook.update_completed(*arguments)
    assert ended.value.code == REQUEUE == os.EX_TEMPFAIL
    assert len(saves) == expected
    for checkpoint, _, position, valid_loss in saves:
        assert not checkpoint.no_last_checkpoints
        assert (position, valid_loss) == ("position", None)


@pytest.mark.parametrize(
    ("flags", "expected"), [([1, 0, 0], (REQUEUE, False)), ([1, 1, 0], (INTERRUPTED, False)), ([0, 0, 1], (None, True))]
)
def test_one_rank_decides_for_all(flags: list[int], expected: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over two ranks, of which the other one has received the signal, or has the clock."""
    monkeypatch.setattr(ending.distributed_utils, "all_reduce", lambda own, group: own.add_(torch.tensor(flags)))
    two = alone()
    vars(two).update(data_parallel_world_size=2, device=torch.device("cpu"), data_parallel_process_group=None)
    assert not ending._received
    assert ending.Signals().due(two) == expected
