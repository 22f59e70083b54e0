"""Runs that are killed, cut short, finished, refused or broken, by subprocess; the reference is the run left alone."""

import resource
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import interrupted_run
import pytest
import torch
from failures import refusal
from forked_command import run_module
from interrupted_run import LAST_UPDATE, RUN, BackgroundRun, assert_same_run, files, flags_command, run_to_end

pytestmark = pytest.mark.slow


def test_killed_and_resumed_is_uninterrupted(binarized_corpus, uninterrupted, tmp_path) -> None:
    """kill -9 in the second epoch, while loader processes hold the next batches; records of three updates, one of them of two
    epochs."""
    save_dir, flags = tmp_path / "run", ["--bf16", "--log-interval", "3"]
    command = flags_command(binarized_corpus, save_dir, *flags)
    run = BackgroundRun(command, tmp_path / "killed.log")
    run.wait_for_update(21)
    run.kill()
    saved = interrupted_run.num_updates(save_dir)
    assert 16 < saved < LAST_UPDATE
    last = run_to_end(command, tmp_path / "last.log")
    reference = uninterrupted(*flags)
    epoch = saved // interrupted_run.updates_per_epoch(reference) + 1
    assert epoch >= 2
    assert f"checkpoint_last.pt (epoch {epoch} @ {saved} updates)" in last
    assert interrupted_run.num_updates(save_dir) == LAST_UPDATE
    logged = [line["update"] for line in interrupted_run.records(reference) if line["split"] == "train"]
    assert logged == list(range(3, LAST_UPDATE + 1, 3))
    assert_same_run(save_dir, reference)
    masters = interrupted_run.checkpoint(save_dir)["last_optimizer_state"]["master_weights"]
    assert any((master != master.bfloat16().float()).any() for master in masters), "bf16 was not in use"


def test_a_finished_run_is_left_alone_and_a_damaged_one_repaired(binarized_corpus, uninterrupted, tmp_path) -> None:
    save_dir = tmp_path / "run"
    reference = uninterrupted()
    shutil.copytree(reference, save_dir)
    command = flags_command(binarized_corpus, save_dir)

    before = files(save_dir)
    again = run_to_end(command, tmp_path / "again.log")
    assert f"is finished ({LAST_UPDATE} updates of --max-update {LAST_UPDATE})" in again
    assert files(save_dir) == before

    last = save_dir / "checkpoint_last.pt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    # checkpoint_best.pt may be of the last update: then nothing would be left to train
    (save_dir / "checkpoint_best.pt").unlink()
    repaired = run_to_end(command, tmp_path / "repaired.log")
    assert "checkpoint_last.pt is damaged: resuming from the newest complete checkpoint" in repaired
    assert "checkpoint_3_35.pt (35 updates)" in repaired
    assert_same_run(save_dir, reference)


def test_a_full_disk_costs_no_checkpoint(binarized_corpus, uninterrupted, tmp_path) -> None:
    save_dir = tmp_path / "run"
    save_dir.mkdir()
    reference = uninterrupted()
    shutil.copytree(reference / "tokenizer", save_dir / "tokenizer")
    shutil.copy(reference / "checkpoint_2_20.pt", save_dir / "checkpoint_last.pt")
    before = files(save_dir)
    run = BackgroundRun(flags_command(binarized_corpus, save_dir), tmp_path / "full.log")
    limit = (save_dir / "checkpoint_last.pt").stat().st_size // 2
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    line = refusal(CompletedProcess([], run.exit_code(), run.log.read_text(), run.errors.read_text()))
    assert line.startswith(f"{save_dir}/checkpoint_")
    assert "cannot be written (File too large): older checkpoints are complete; make room" in line
    after = files(save_dir)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"metrics.jsonl"}


def test_a_broken_update_ends_with_one_line(binarized_corpus: Path, tmp_path: Path) -> None:
    """Stock fairseq would write crash.pt, log the norms of all parameters, and end in a traceback."""
    flags = ["--lr", "1e30", "--warmup-updates", "0", "--clip-norm", "0"]
    words = [str(binarized_corpus), *RUN, "--save-dir", str(tmp_path / "run"), *flags]
    line = refusal(run_module("fairseq_cli.train", words))
    assert line.startswith("update 2: the gradient is not finite (")
    assert "mlm_loss_1 = nan, mlm_loss_2 = nan, rtd_loss = nan; no loss scale): lower the learning rate" in line
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--finetune-from-model OLD --encoder-embed-dim 16", "contains another model than the settings describe: "),
        ("--restore-file gone.pt", "gone.pt cannot be read (No such file or directory)"),
        ("--distributed-world-size 2", "would train nothing: start it with 'torchrun --nproc-per-node 2"),
        ("--fp16", "--fp16 needs a GPU"),
        ("--update-freq 5000", "blocks, fewer than the 80000"),
    ],
)
def test_refused_starts(flags, line, binarized_corpus, uninterrupted, refused_training, tmp_path) -> None:
    """None of these comes as far as an update."""
    words = flags.replace("OLD", str(uninterrupted() / "checkpoint_last.pt")).split()
    save_dir = tmp_path / "run"
    assert line in refused_training(binarized_corpus, *RUN, "--save-dir", save_dir, *words)
    assert [path.name for path in save_dir.glob("*")] in ([], [".lock"])
    assert not torch.distributed.is_initialized()
