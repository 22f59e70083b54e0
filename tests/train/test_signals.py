"""SIGTERM and SIGUSR1 as schedulers send them: the update is finished, saved, and the exit code asks for a new start."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interrupted_run import (
    LAST_UPDATE,
    RUN,
    BackgroundRun,
    assert_same_run,
    checkpoint,
    flags_command,
    num_updates,
    uninterrupted,
    updates_per_epoch,
)
from tiny_runs import ROOT

from amos_fairseq.compat.signals import REQUEUE

pytestmark = pytest.mark.slow


def stopped_after(run: BackgroundRun, name: str) -> int:
    """The update after which the run says that it has stopped."""
    assert "Traceback" not in run.text(), run.text()[-3000:]
    (update,) = re.findall(rf"{name}: stopped after update (\d+), exit code {REQUEUE}", run.text())
    return int(update)


def test_sigterm_to_the_whole_group_costs_nothing(
    binarized_corpus: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Loader processes receive it as well, as from Slurm; the run goes on where it stopped, within the epoch."""
    save_dir = tmp_path / "run"
    # Without fairseq's buffer the loader process is two batches ahead, and not at the end of the epoch already.
    command = flags_command(binarized_corpus, save_dir, "--data-buffer-size", "0")
    run = BackgroundRun(command, tmp_path / "stopped.log")
    run.wait_for_update(7)
    run.signal_group(signal.SIGTERM)
    assert run.exit_code() == REQUEUE, run.text()[-3000:]
    stopped = stopped_after(run, "SIGTERM")
    assert 7 <= stopped == num_updates(save_dir) < LAST_UPDATE
    epochs, updates = divmod(stopped, updates_per_epoch(save_dir))
    position = checkpoint(save_dir)["extra_state"]["train_iterator"]
    assert (position["epoch"], position["iterations_in_epoch"]) == (epochs + 1, updates)

    resumed = BackgroundRun(command, tmp_path / "resumed.log")
    assert resumed.exit_code() == 0, resumed.text()[-3000:]
    assert f"checkpoint_last.pt (epoch {epochs + 1} @ {stopped} updates)" in resumed.text()
    assert_same_run(save_dir, uninterrupted(binarized_corpus, tmp_path_factory))


def test_sigusr1_through_hydra(binarized_corpus: Path, tmp_path: Path) -> None:
    """Between two checkpoints that the YAML asks for (every 700 updates), in a run that Hydra has started."""
    save_dir = tmp_path / "run"
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", "--config-dir", "examples/pretraining/config"]
    command += ["--config-name", "amos_tiny", f"task.data={binarized_corpus}", f"checkpoint.save_dir={save_dir}"]
    command += ["task.tokens_per_sample=32", "model.max_positions=32", "dataset.batch_size=16", "common.log_interval=1"]
    run = BackgroundRun(["env", f"PYTHONPATH={ROOT}", *command], tmp_path / "hydra.log")
    run.wait_for_update(20)
    run.signal_group(signal.SIGUSR1)
    assert run.exit_code() == REQUEUE, run.text()[-3000:]
    assert num_updates(save_dir) == stopped_after(run, "SIGUSR1") >= 20


def child_processes(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in listed.stdout.split()]


def test_one_rank_stops_all_and_they_resume(binarized_corpus: Path, tmp_path: Path) -> None:
    """Two gloo ranks, of which one receives the signal; resuming sends the checkpoint from rank 0 to rank 1."""
    save_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fairseq_cli.train", str(binarized_corpus), *RUN, "--batch-size", "8"]
    command += ["--save-dir", str(save_dir)]
    run = BackgroundRun(command, tmp_path / "stopped.log")
    run.wait_for_update(7)
    second = max(child_processes(run.process.pid))
    os.kill(second, signal.SIGUSR1)
    assert run.exit_code() != 0  # torchrun's own code; each rank's stands in its report
    assert len(re.findall(rf"exitcode\s*: {REQUEUE}", run.text())) >= 1
    stopped = num_updates(save_dir)
    assert 7 <= stopped < LAST_UPDATE
    assert f"stopped after update {stopped}, exit code {REQUEUE}" in run.text()

    resumed = BackgroundRun(command, tmp_path / "resumed.log")
    assert resumed.exit_code() == 0, resumed.text()[-3000:]
    assert re.search(rf"Loaded checkpoint .*checkpoint_last.pt \(epoch \d @ {stopped} updates\)", resumed.text())
    assert num_updates(save_dir) == LAST_UPDATE
