"""The signals of schedulers: the update is finished, saved, and the exit code asks for a new start, which loses nothing."""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked_command import run_command
from interrupted_run import (
    LAST_UPDATE,
    RUN,
    BackgroundRun,
    assert_same_run,
    checkpoint,
    flags_command,
    num_updates,
    run_to_end,
    updates_per_epoch,
)
from tiny_runs import run_process
from torch.distributed.run import get_args_parser

from amos_fairseq.errors import INTERRUPTED, REQUEUE
from amos_fairseq.run.signals import SIGNALS

pytestmark = pytest.mark.slow
# A run of 38 updates receives signals in turn, in its first and second epoch of 16 updates; it must not end earlier.
SENT_AFTER = {signal.SIGTERM: 5, signal.SIGUSR1: 11, signal.SIGUSR2: 18, signal.SIGINT: 24}
EXIT_CODES = {**dict.fromkeys(SIGNALS, REQUEUE), signal.SIGINT: INTERRUPTED}


def stop_and_continue(
    command: list[str],
    save_dir: Path,
    logs: Path,
    send: Callable[[BackgroundRun, int], None],
    numbers: Sequence[int],
    exit_code: int | None = None,
) -> str:
    """Send each signal to ``command``, start it again each time, and let it end; each part begins where the last stopped.

    Returns what the last part prints.
    """
    before = 0
    for number in numbers:
        update = SENT_AFTER[number]
        name = signal.Signals(number).name
        run = BackgroundRun(command, logs / f"{name}.log")
        run.wait_for_update(max(update, before + 2))
        send(run, number)
        assert run.exit_code() == (EXIT_CODES[number] if exit_code is None else exit_code), run.text()[-3000:]
        stopped = stopped_after(run, number)
        assert update <= stopped == num_updates(save_dir) < LAST_UPDATE
        assert before == 0 or f"@ {before} updates)" in run.text(), run.text()[-3000:]
        epochs, updates = divmod(stopped, updates_per_epoch(save_dir))
        position = checkpoint(save_dir)["extra_state"]["train_iterator"]
        assert (position["epoch"], position["iterations_in_epoch"]) == (epochs + 1, updates)
        before = stopped
    text = run_to_end(command, logs / "last.log")
    assert f"@ {before} updates)" in text
    return text


def stopped_after(run: BackgroundRun, number: int) -> int:
    """The update after which rank 0 says that it has stopped, and why."""
    reason = rf"(?:{signal.Signals(number).name}|a signal to another rank)"
    updates = re.findall(rf"{reason}: stopped after update (\d+), exit code {EXIT_CODES[number]};", run.text())
    assert updates, run.text()[-3000:]
    assert len(set(updates)) == 1
    return int(updates[0])


def test_signals_to_the_whole_group_cost_nothing(
    binarized_corpus: Path, uninterrupted: Callable[..., Path], tmp_path: Path
) -> None:
    """Loader processes receive it as well, as from Slurm; the run goes on where it stopped, within the epoch."""
    # Without fairseq's buffer the loader process is two batches ahead, and not at the end of the epoch already.
    command = flags_command(binarized_corpus, tmp_path / "run", "--data-buffer-size", "0")
    numbers = [signal.SIGTERM, signal.SIGINT]
    stop_and_continue(command, tmp_path / "run", tmp_path, BackgroundRun.signal_group, numbers)
    for log in tmp_path.glob("*.err"):
        assert "Traceback" not in log.read_text()
    assert_same_run(tmp_path / "run", uninterrupted())


def two_ranks(module: str, *flags: str) -> list[str]:
    """Under torchrun, which passes the signals of PET_SIGNALS_TO_HANDLE on to the ranks, as torchrun.sh sets it."""
    # Without the address torchrun asks the name server for that of this machine.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", "2"]
    return [*torchrun, "-m", module, *flags]


def passes_signals_on() -> bool:
    """Whether torchrun has ``--signals-to-handle``, which came with PyTorch 2.9."""
    return "signals_to_handle" in vars(get_args_parser().parse_args(["script.py"]))


def to_ranks(run: BackgroundRun, number: int) -> None:
    """SIGTERM to the second rank, as from its node; others to torchrun."""
    pid = run.process.pid
    if number == signal.SIGTERM:
        pid = max(map(int, run_process(["ps", "-o", "pid=", "--ppid", pid]).stdout.split()))
    os.kill(pid, number)


def test_signals_to_two_ranks(binarized_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo ranks: one stops all; resuming sends the checkpoint from rank 0 to rank 1; the bits are those of two ranks
    that were left alone, without torchrun. torchrun's own exit code is 1, whatever a rank's is; each rank's is in its report.
    """
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1,SIGUSR2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def flags(name: str) -> list[str]:
        return [str(binarized_corpus), *RUN, "--batch-size", "8", "--save-dir", str(tmp_path / name)]

    numbers = [signal.SIGTERM, signal.SIGUSR2] if passes_signals_on() else [signal.SIGTERM]
    command = two_ranks("fairseq_cli.train", *flags("run"))
    text = stop_and_continue(command, tmp_path / "run", tmp_path, to_ranks, numbers, exit_code=1)
    cores = len(os.sched_getaffinity(0))
    for rank in range(2):
        assert re.search(rf"rank {rank} of 2 on \S+: {cores} CPUs, OMP_NUM_THREADS=1\n", text)
    run_command("fairseq_cli.train", flags("undisturbed"), num_ranks=2)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
