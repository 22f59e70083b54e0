"""Training runs in the background that a test can interrupt, and the comparison of the files of two runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from forked_command import ON_CPU, ForkedCommand, rank_variables
from tiny_runs import ROOT, TINY_RUN, environment, run_process

# The synthetic corpus has about 16 updates an epoch: the run ends in its third one, and saves within each. A test that
# signals it a second late still finds it running. One loader process is fairseq's default.
LAST_UPDATE = 38
RUN = [*TINY_RUN, "--num-workers", "1", "--save-interval-updates", "5", "--max-update", str(LAST_UPDATE)]
MOST_SECONDS = 300.0  # of a run that takes about ten on an idle machine
# Keys that depend on the clock; fairseq stores meters of them in the checkpoint as well.
CLOCK = {"wps", "ups", "wall", "train_wall", "tokens_per_second", "gb_free"}


def flags_command(data: Path, save_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "fairseq_cli.train", str(data), *RUN, "--save-dir", str(save_dir), *flags]


class BackgroundRun:
    """A training in a process group of its own, so that its loader processes can be reached with it.

    Of several ranks, which need a command that starts with ``python -m``, ``process`` is the first.
    """

    process: ForkedCommand | subprocess.Popen

    def __init__(self, command: list[str], log: Path, num_ranks: int = 1, cwd: Path = ROOT) -> None:
        self.log, self.errors = log, log.with_suffix(".err")
        if command[:2] == [sys.executable, "-m"]:
            variables = [{}] if num_ranks == 1 else [ON_CPU | each for each in rank_variables(num_ranks)]
            outputs = self.log, self.errors
            self.ranks = [ForkedCommand(command[2], command[3:], cwd, *outputs, env=env) for env in variables]
        else:
            with self.log.open("w") as out, self.errors.open("w") as err:
                self.ranks = [
                    subprocess.Popen(
                        command, cwd=cwd, env=environment(), stdout=out, stderr=err, start_new_session=True
                    )
                ]
        self.process = self.ranks[0]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8") + self.errors.read_text(encoding="utf-8")

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Return when ``condition`` holds; the run must not end before, nor ``MOST_SECONDS`` pass."""
        end = time.monotonic() + MOST_SECONDS
        while not condition():
            ended = self.process.poll() is not None or time.monotonic() > end
            assert not ended, self.text()[-3000:]
            time.sleep(0.005)

    def wait_for_update(self, update: int) -> None:
        self.wait_until(lambda: re.search(rf"train_inner.* num_updates={update},", self.text()))

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Without warning: SIGKILL to the training process and all of its children."""
        self.signal_group(signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL

    def exit_code(self) -> int:
        """Wait for the end. A run that does not end is killed, and the failure shows where each of its threads was."""
        try:
            (code,) = {rank.wait(MOST_SECONDS) for rank in self.ranks}
            return code
        except subprocess.TimeoutExpired:
            processes = self.all_processes()
            for number in (signal.SIGABRT, signal.SIGKILL):  # faulthandler prints the stacks
                for pid in processes:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(1)
            raise AssertionError(f"not ended after {MOST_SECONDS} s\n{self.text()[-20000:]}") from None

    def all_processes(self) -> list[int]:
        """The ids of the run, its children, and theirs: torchrun's ranks have process groups of their own."""
        listed = [map(int, line.split()) for line in run_process(["ps", "-e", "-o", "pid=,ppid="]).stdout.splitlines()]
        children: dict[int, list[int]] = {}
        for pid, parent in listed:
            children.setdefault(parent, []).append(pid)
        pids = [rank.pid for rank in self.ranks]
        for pid in pids:
            pids += children.get(pid, [])
        return pids


def run_to_end(command: list[str], log: Path, num_ranks: int = 1) -> str:
    """Run a training, assert that it ends well, and return what it prints."""
    run = BackgroundRun(command, log, num_ranks)
    assert run.exit_code() == 0, run.text()[-3000:]
    return run.text()


def killed_at(update: int, run: Path, save_dir: Path) -> Path:
    """Return a copy of a run as a kill leaves it after this update, which the run has saved."""
    save_dir.mkdir()
    (saved,) = run.glob(f"checkpoint_*_{update}.pt")
    shutil.copy(saved, save_dir / "checkpoint_last.pt")
    shutil.copy(run / "metrics.jsonl", save_dir)
    return save_dir


def checkpoint(save_dir: Path, name: str = "checkpoint_last.pt") -> dict[str, Any]:
    return torch.load(save_dir / name, weights_only=True, map_location="cpu")


def num_updates(save_dir: Path) -> int:
    return checkpoint(save_dir)["optimizer_history"][-1]["num_updates"]


def updates_per_epoch(save_dir: Path) -> int:
    first = records(save_dir)[0]
    return round(first["update"] / first["epoch"])


def files(save_dir: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification time of every file but the lock."""
    paths = [path for path in sorted(save_dir.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(save_dir)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def records(save_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, without the keys that depend on the clock."""
    lines = (save_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def assert_same_bits(actual: Any, expected: Any, where: str) -> None:
    """Equal structure, types and bits; tensors of the same dtype."""
    assert type(actual) is type(expected), where
    if torch.is_tensor(expected):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same_bits(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (value, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(value, other, f"{where}[{index}]")
    else:
        assert actual == expected, where


def assert_same_run(save_dir: Path, reference: Path) -> None:
    """Parameters, optimizer state, position in the data and logged values, bit for bit."""
    actual, expected = checkpoint(save_dir), checkpoint(reference)
    for part in ("model", "last_optimizer_state", "task_state"):
        assert_same_bits(actual[part], expected[part], part)
    assert_same_bits(actual["optimizer_history"], expected["optimizer_history"], "optimizer_history")
    for part in ("train_iterator", "val_loss", "best", "recent_updates"):
        assert_same_bits(actual["extra_state"][part], expected["extra_state"][part], part)
    assert records(save_dir) == records(reference)
