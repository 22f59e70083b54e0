"""Signals to ranks, launchers and loader processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf

from amos_fairseq.errors import INTERRUPTED, REQUEUE
from amos_fairseq.run import mistakes, signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves no received signal and the handlers of the test runner."""
    with signals.handled():
        yield


def alone(updates: int = 5) -> Any:
    task = SimpleNamespace(cfg=SimpleNamespace())
    return SimpleNamespace(data_parallel_world_size=1, get_num_updates=lambda: updates, task=task)


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_a_rank_records_the_signal(number: int) -> None:
    signals.install_handlers()
    signals.Signals().before_epoch(None, None)
    assert signals.Signals().due(alone()) == (None, False)
    os.kill(os.getpid(), number)
    assert signals.Signals().due(alone()) == ({signal.SIGINT: INTERRUPTED}.get(number, REQUEUE), False)


def test_ctrl_c_before_the_first_update_ends_at_once(capfd: pytest.CaptureFixture) -> None:
    signals.install_handlers()
    with pytest.raises(SystemExit) as ended, mistakes.exit_on_mistake():
        os.kill(os.getpid(), signal.SIGINT)
    assert ended.value.code == INTERRUPTED
    assert capfd.readouterr().err.splitlines() == ["", "amos_fairseq: interrupted: nothing was saved"]


def press_twice(seconds_between: float) -> None:
    signals.install_handlers()
    signals.Signals().before_epoch(None, None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        signals._interrupted_at[0] -= seconds_between
    sys.exit(signals.Signals().due(alone())[0])


@pytest.mark.parametrize(("seconds", "code"), [(0.0, INTERRUPTED), (2.0, -signal.SIGINT)])
def test_a_second_ctrl_c_ends_at_once(seconds: float, code: int, capfd: pytest.CaptureFixture) -> None:
    """But not the copy of the first one that a launcher sends."""
    process = multiprocessing.get_context("fork").Process(target=press_twice, args=(seconds,))
    process.start()
    process.join(60)
    assert process.exitcode == code
    assert capfd.readouterr().err.count("Ctrl-C: finishing this update and saving") == 1


def wait_for_signal(ready: Any) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.SIGNALS)
    ready.set()
    sys.exit(100 + signal.sigwait(signals.SIGNALS))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_launcher_passes_the_signal_on_to_its_ranks(number: int) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    rank = context.Process(target=wait_for_signal, args=(ready,))
    rank.start()
    assert ready.wait(30)
    signals.note_signal(number, None)
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
    signals.install_handlers()
    batches = iter(torch.utils.data.DataLoader(SlowNumbers(), num_workers=1, multiprocessing_context="fork"))
    first = int(next(batches))
    pid = batches._workers[0].pid
    for number in signals.SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)
    assert [first, *(int(batch) for batch in batches)] == list(range(6))


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("settings", "saved_at", "expected"),
    [
        ({}, None, 1),
        ({}, 5, 0),  # this update has just been saved
        ({"no_last_checkpoints": True}, 5, 1),  # but not as checkpoint_last.pt
        ({"no_save": True}, None, 0),
    ],
)
def test_checkpoint_before_the_exit(settings: dict, saved_at: Any, expected: int, saves: list) -> None:
    trainer, hook = alone(updates=5), signals.Signals()
    if saved_at is not None:
        hook.after_save(alone(updates=saved_at))
    saving = {"restore_file": "checkpoint_last.pt", "no_save": False, "no_last_checkpoints": False, **settings}
    cfg = OmegaConf.create({"checkpoint": saving})
    arguments = (cfg, trainer, "position", False)
    hook.update_completed(*arguments)
    signals._received.append(signal.SIGTERM)
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
    monkeypatch.setattr(signals.distributed_utils, "all_reduce", lambda own, group: own.add_(torch.tensor(flags)))
    two = alone()
    vars(two).update(data_parallel_world_size=2, device=torch.device("cpu"), data_parallel_process_group=None)
    assert not signals._received
    assert signals.Signals().due(two) == expected
