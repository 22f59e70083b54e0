"""``fairseq-hydra-train`` and ``amos train``: they train and continue the same run."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from forked_command import run_module
from interrupted_run import assert_same_bits
from tiny_runs import ROOT

from amos_fairseq.checkpoints.read import read_state
from amos_fairseq.run.metrics_file import read_records

COMMAND = ["--config-dir", "examples/pretraining/config", "--config-name", "amos_tiny"]
# 64 blocks of 32 tokens make three updates an epoch, so that update 4 is in the second.
SMALLER = shlex.split(
    "task.tokens_per_sample=32 model.max_positions=32 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 "
    "dataset.batch_size=64 lr_scheduler.warmup_updates=2 lr_scheduler.total_num_update=20 common.log_interval=1 "
    "checkpoint.save_interval_updates=4"
)


def hydra_train(checkout: Path, *overrides: str) -> subprocess.CompletedProcess:
    """Run the command in ``checkout``."""
    return run_module("fairseq_cli.hydra_train", [*COMMAND, *SMALLER, *overrides], checkout)


@pytest.mark.slow
def test_same_command_continues_the_run_bit_for_bit(tmp_path, binarized_corpus, tmp_path_factory) -> None:
    """The run without an interruption is one of ``amos train`` in a folder without a checkout, with a recipe of that folder.

    The first half names the precision, and the second one has the recipe's ``auto``, which keeps it on any processor.
    """
    checkout, data = tmp_path, f"task.data={binarized_corpus}"
    for name in ("amos_fairseq", "examples"):
        (checkout / name).symlink_to(ROOT / name)
    elsewhere = tmp_path_factory.mktemp("with a space")
    (elsewhere / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/fairseq/defaults@_global_, /amos_tiny, _self_]\ncheckpoint: {save_dir: runs/whole}\n"
    )
    bf16 = "task.precision=bf16"
    whole_run = ["train", "mine.yaml", *SMALLER, data, bf16, "optimization.max_update=8"]
    for done in (
        hydra_train(checkout, data, bf16, "checkpoint.save_dir=runs/halves", "optimization.max_update=4"),
        hydra_train(checkout, data, "checkpoint.save_dir=runs/halves", "optimization.max_update=8"),
        run_module("amos_fairseq.cli.main", whole_run, elsewhere),
    ):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[amos_fairseq.run.progress][INFO] - runs/whole: 8 updates" in done.stdout.splitlines()[0], done.stderr
    assert "tensorboardX" not in done.stdout + done.stderr
    halves, whole = checkout / "runs" / "halves", elsewhere / "runs" / "whole"

    assert sorted(path.name for path in checkout.iterdir()) == ["amos_fairseq", "examples", "runs"]
    assert {".hydra", "tensorboard", "tokenizer", "hydra_train.log", "metrics.jsonl"} <= set(os.listdir(halves))
    log = (halves / "hydra_train.log").read_text(encoding="utf-8")
    assert "Loaded checkpoint runs/halves/checkpoint_last.pt (epoch 2 @ 4 updates)" in log
    chosen = re.findall(r"precision: (\w+(?: \(auto: as in [^,)\n]+)?)", log)
    assert chosen == ["bf16", "bf16 (auto: as in runs/halves/checkpoint_last.pt"]

    continued, straight = read_state(halves / "checkpoint_last.pt"), read_state(whole / "checkpoint_last.pt")
    assert continued["optimizer_history"][-1]["num_updates"] == 8
    assert continued["cfg"]["task"]["precision"] == straight["cfg"]["task"]["precision"] == "bf16"
    assert continued["cfg"]["common"]["bf16"] is straight["cfg"]["common"]["bf16"] is True
    assert_same_bits(continued["model"], straight["model"], "model")
    assert_same_bits(continued["last_optimizer_state"]["state"], straight["last_optimizer_state"]["state"], "state")
    losses = [
        [(record["update"], record["loss"]) for record in read_records(run) if record["split"] == "train"]
        for run in (halves, whole)
    ]
    assert [update for update, _ in losses[1]] == list(range(1, 9))
    assert losses[0] == losses[1]
    # "best" is the newest by definition.
    assert read_state(halves / "checkpoint_best.pt")["optimizer_history"][-1]["num_updates"] == 8
