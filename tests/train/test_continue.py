"""A run that goes on with other text, both ways with a new schedule and the weights of the old run; a branch of a run."""

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.data import indexed_dataset
from interrupted_run import (
    LAST_UPDATE,
    BackgroundRun,
    assert_same_run,
    checkpoint,
    flags_command,
    killed_at,
    num_updates,
    records,
    run_to_end,
)
from synthetic_corpus import write_rows

from amos_fairseq.errors import REQUEUE

pytestmark = pytest.mark.slow

LEARNING_RATE = 0.0005
# No warm-up, whose first update has learning rate 0: one above 0 shows in the first update that the schedule is new.
SCHEDULE = ["--lr", str(LEARNING_RATE), "--warmup-updates", "0", "--total-num-update", "8", "--max-update", "4"]
FLAGS = [*SCHEDULE, "--save-interval-updates", "1"]
RESETS = ["--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader", "--reset-meters"]


@pytest.fixture(scope="module")
def other_corpus(binarized_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The words of the first corpus in another order, with its dictionary."""
    out = tmp_path_factory.mktemp("other")
    shutil.copy(binarized_corpus / "dict.txt", out)
    words = torch.cat(list(indexed_dataset.MMapIndexedDataset(str(binarized_corpus / "train")))).int()
    for split in ("train", "valid"):
        write_rows(out, split, words[torch.randperm(len(words), generator=torch.Generator().manual_seed(1))].split(30))
    return out


@pytest.fixture
def old(uninterrupted: Callable[..., Path]) -> Path:
    return uninterrupted() / "checkpoint_last.pt"


def assert_first_update_starts_from(old: Path, save_dir: Path) -> None:
    """Adam's first step with a fresh state moves each parameter by the learning rate at most, whatever its gradient.

    From other weights the differences would be those of two initialisations, a hundred times as large; with the old
    moments the counter would not be 1.
    """
    first, before = checkpoint(save_dir, "checkpoint_1_1.pt"), torch.load(old, weights_only=True)["model"]
    moved = max(float((parameter - before[name]).abs().max()) for name, parameter in first["model"].items())
    assert 0.5 * LEARNING_RATE < moved < 1.001 * LEARNING_RATE
    assert {float(state["step"]) for state in first["last_optimizer_state"]["state"].values()} == {1.0}
    assert first["optimizer_history"][-1]["num_updates"] == 1


def test_continuing_on_other_text_starts_a_schedule_once(other_corpus: Path, old: Path, tmp_path: Path) -> None:
    """The old run stands at update 38; the new ones count from 0, and one that was killed goes on where it was."""
    tuned, restored = tmp_path / "tuned", tmp_path / "restored"
    command = flags_command(other_corpus, tuned, *FLAGS, "--finetune-from-model", str(old))
    assert f"loading pretrained model from {old}" in run_to_end(command, tmp_path / "tuned.log")
    assert torch.load(old, weights_only=True)["optimizer_history"][-1]["num_updates"] == LAST_UPDATE
    assert_first_update_starts_from(old, tuned)
    logged = [record for record in records(tuned) if record["split"] == "train"]
    assert [record["update"] for record in logged] == [1, 2, 3, 4]
    assert all(0 < record["lr"] <= LEARNING_RATE for record in logged)

    killed = killed_at(2, tuned, tmp_path / "killed")
    again = run_to_end([str(killed) if part == str(tuned) else part for part in command], tmp_path / "again.log")
    assert "checkpoint_last.pt (epoch 1 @ 2 updates)" in again
    assert "loading pretrained model" not in again
    assert_same_run(killed, tuned)

    reset = flags_command(other_corpus, restored, *FLAGS, "--restore-file", str(old), *RESETS)
    run_to_end(reset, tmp_path / "restored.log")
    assert_first_update_starts_from(old, restored)
    assert_same_run(restored, tuned)


def test_a_branch_decays_from_the_constant_part(binarized_corpus: Path, tmp_path: Path) -> None:
    """Rates by hand: warm-up of 2 updates, then the peak; the branch, in the last phase, ends at update 8, also if killed."""
    constant = ["--lr-scheduler", "warmup_stable_decay", "--decay-share", "0", "--save-interval-updates", "1"]
    constant += ["--phases", "[{length: 8, share: 0.8}, {length: 32, share: 0.2}]"]
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    run_to_end(flags_command(binarized_corpus, trunk, *constant, "--max-update", "6"), tmp_path / "trunk.log")
    start = trunk / "checkpoint_1_4.pt"
    flags = [*constant, "--decay-from", str(start), "--max-update", "8", "--total-num-update", "8"]
    command = flags_command(binarized_corpus, branch, *flags)
    run_to_end(command, tmp_path / "branch.log")
    of_trunk, of_branch = ([each for each in records(run) if each["split"] == "train"] for run in (trunk, branch))
    logged = of_trunk[:4] + of_branch
    assert [record["tokens_per_block"] for record in logged] == [8] * 4 + [32] * 4
    rates = {record["update"]: record["lr"] for record in logged}
    peak = 0.002
    decay = {4 + n: peak * (1 - (n / 4) ** 0.5) for n in range(1, 5)}
    assert rates == pytest.approx({1: peak / 2, 2: peak, 3: peak, 4: peak} | decay)

    killed = killed_at(6, branch, tmp_path / "killed")
    start.unlink()
    run_to_end([str(killed) if part == str(branch) else part for part in command], tmp_path / "again.log")
    assert_same_run(killed, branch)


def test_the_schedule_of_epochs_ends_with_the_last_one(binarized_corpus: Path, tmp_path: Path) -> None:
    """Three epochs of different shards and updates on two ranks; the last update is that at which fairseq ends them."""
    small, whole = tmp_path / "small", tmp_path / "whole"
    shutil.copytree(binarized_corpus, small)
    for ending in ("bin", "idx"):
        shutil.copy(small / f"valid.{ending}", small / f"train.{ending}")
    flags = "--lr-scheduler warmup_stable_decay --max-update 0 --total-num-update 0 --max-epoch 3 --update-freq 1,1,2"
    flags += " --batch-size 8 --save-interval-updates 1 --save-interval 9 --validate-interval 9"
    command = flags_command(f"{binarized_corpus}:{small}", whole, *flags.split())
    text = run_to_end(command, tmp_path / "whole.log", num_ranks=2)
    last, peak = num_updates(whole), 0.002
    assert f"the run ends at update {last}, the warm-up of its learning rate at 2\n" in text
    logged = [each for each in records(whole) if each["split"] == "train"]
    assert {each["bsz"] for each in logged} == {16, 32}, "two sizes of updates"
    rates = {each["update"]: each["lr"] for each in logged}
    assert rates == pytest.approx({n: peak * min(n / 2, (last - n) / (last - 2)) for n in range(1, last + 1)})

    killed = killed_at(last - 2, whole, tmp_path / "killed")
    again = [str(killed) if part == str(whole) else part for part in command]
    run_to_end(again, tmp_path / "again.log", num_ranks=2)
    assert_same_run(killed, whole)


def test_a_run_of_minutes_ends_in_time(binarized_corpus: Path, tmp_path: Path) -> None:
    """Twelve seconds, two thirds with blocks of 8 tokens; stopped once, it goes on. The lines count the minutes."""
    flags = ["--lr-scheduler", "warmup_stable_decay", "--minutes", "0.2", "--max-update", "0"]
    flags += ["--total-num-update", "20"]  # of them, the warm-up has two
    flags += ["--phases", "[{length: 8, share: 0.67}, {length: 32, share: 0.33}]", "--log-interval", "2"]
    command = flags_command(binarized_corpus, tmp_path / "run", *flags)
    first = BackgroundRun(command, tmp_path / "first.log")
    first.wait_for_update(10)
    first.signal_group(signal.SIGTERM)
    assert first.exit_code() == REQUEUE
    stopped = num_updates(tmp_path / "run")
    text = run_to_end(command, tmp_path / "second.log")
    assert re.search(r"updates in 0\.(19|2\d) of 0\.2 minutes", text)
    # The line comes after 22 updates of a process, if it gets there, and if their record has not just been logged.
    measured = stopped + 22
    line = re.search(r"update \d+, minute 0\.\d of 0\.2: loss .* about \d+ s to the end", text)
    assert line or measured % 2 == 0 or num_updates(tmp_path / "run") < measured
    logged = [record for record in records(tmp_path / "run") if record["split"] == "train"]
    lengths = [record["tokens_per_block"] for record in logged]
    assert (lengths[0], lengths[-1], lengths) == (8, 32, sorted(lengths))
    # 0: on a busy machine the validation takes longer than the one before, and the last update starts after the decay.
    assert 0 <= logged[-1]["lr"] < 0.1 * max(record["lr"] for record in logged)
    last = checkpoint(tmp_path / "run")["optimizer_history"][-1]
    assert last["lr_scheduler_state"]["ended_minutes"] == 0.2
    *_, end = records(tmp_path / "run")
    assert (end["split"], end["update"]) == ("valid", last["num_updates"])
