"""Runs that are killed at any moment, or of which any file is damaged: the end is that of an undisturbed run."""

import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from damage import TRIES, assert_clean_end, damage, run_bounded
from interrupted_run import BackgroundRun, assert_same_bits, assert_same_run, checkpoint, flags_command
from tiny_runs import ROOT

# Records of several updates, so that one of them is interrupted; two checkpoints beside the last one.
FLAGS = ("--log-interval", "3", "--keep-interval-updates", "2")


def kill(command: list[str], save_dir: Path, draw: random.Random, at_write: bool) -> None:
    """Start a run and kill it after a random time, or while it writes a checkpoint, if it has not ended before."""
    run = BackgroundRun(command, save_dir.with_suffix(".log"))
    end = time.monotonic() + draw.uniform(0.5, 5.0)
    while run.process.poll() is None:
        is_writing = at_write and any(save_dir.glob("checkpoint*.unfinished.*"))
        if is_writing or (not at_write and time.monotonic() > end):
            time.sleep(draw.uniform(0, 0.01))
            with suppress(ProcessLookupError):
                run.signal_group(signal.SIGKILL)
            run.process.wait(30)
        time.sleep(0.0005)


@pytest.mark.parametrize("number", range(TRIES))
def test_kills_change_no_bit(number: int, binarized_corpus: Path, uninterrupted, tmp_path: Path) -> None:
    """One to three kills of a run, some of them at the write of a checkpoint."""
    draw, flags = random.Random(number), [*FLAGS, *(["--bf16"] if number % 2 else [])]
    command = flags_command(binarized_corpus, tmp_path / "run", *flags)
    for at_write in (True, False, True)[: 1 + number % 3]:
        kill(command, tmp_path / "run", draw, at_write)
    code, text = run_bounded(command[2], command[3:], ROOT)
    assert code == 0, text[-3000:]
    assert_clean_end(code, text, tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted(*flags))


@pytest.mark.parametrize("number", range(TRIES))
def test_a_damaged_file_costs_no_bit(number: int, binarized_corpus: Path, uninterrupted, tmp_path: Path) -> None:
    """Damage a file of an unfinished run: the run continues to the same end, or is refused."""
    draw, run, reference = random.Random(number), tmp_path / "run", uninterrupted(*FLAGS)
    shutil.copytree(reference, run)
    middle = min(run.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
    shutil.copy(middle, run / "checkpoint_last.pt")
    for path in {*run.glob("checkpoint_*.pt")} - {middle, run / "checkpoint_last.pt"}:
        path.unlink()
    paths = sorted(path for path in run.rglob("*") if path.is_file() and path.name[0] != ".")
    (path,) = draw.choices(paths, [10 if path.suffix == ".pt" else 3 for path in paths])
    damage(path, draw)
    command = flags_command(binarized_corpus, run, *FLAGS)
    code, text = run_bounded(command[2], command[3:], ROOT)
    assert_clean_end(code, text, run)
    if code == 0 and path.name != "metrics.jsonl":
        assert_same_bits(checkpoint(run)["model"], checkpoint(reference)["model"], path.name)
