"""Several ranks train what one rank trains; launches that would train copies or nothing end with one line.

Compared: one rank with update_freq 4, and two gloo ranks with update_freq 2 that stop in the second epoch and are continued
by one rank. Dropout and Gumbel noise are on, an epoch ends on the way, and loader processes differ.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from failures import refusal
from fairseq import distributed_utils
from forked_command import ON_CPU, run_command
from interrupted_run import BackgroundRun, checkpoint
from tiny_runs import TINY_RUN

from amos_fairseq.run.metrics_file import read_records

# Global batch 16: the synthetic corpus gives 18 updates an epoch.
LAST_UPDATE = 22
CHANGE_OF_RANKS = 20
# Float32 gradients are summed in another order (relative 1e-7); Adam divides them by their own size, so that entries near
# zero feel it most. Seen: 3e-6. An update moves a parameter by about the learning rate, 2e-3: other noise or other blocks
# in a single update show.
PARAMETER_TOLERANCE = 5e-5
# fairseq rounds what it logs to 3 digits.
LOSS_TOLERANCE = 2e-3
LOGGED = ("loss", "mlm_loss_1", "mlm_loss_2", "mixture_1", "rtd_loss", "rtd_auc", "replaced")

FLAGS = ["--batch-size", "4", "--validate-interval-updates", "0", "--keep-interval-updates", "1"]


def records(save_dir: Path, split: str) -> dict[int, dict]:
    """Update -> what was logged for it."""
    return {record["update"]: record for record in read_records(save_dir) if record["split"] == split}


def assert_same_run(save_dir: Path, reference: Path) -> None:
    expected = checkpoint(reference)["model"]
    for name, parameter in checkpoint(save_dir)["model"].items():
        assert (parameter - expected[name]).abs().max() < PARAMETER_TOLERANCE, name
    # wpb and bsz, the tokens and blocks of an update, are those of all ranks; a validation step has more on more ranks.
    for split, keys in (("train", (*LOGGED, "wpb", "bsz")), ("valid", LOGGED)):
        expected_records, found = records(reference, split), records(save_dir, split)
        assert max(found) == max(expected_records) == LAST_UPDATE
        for update in expected_records:
            for key in keys:
                difference = abs(found[update][key] - expected_records[update][key])
                assert difference < LOSS_TOLERANCE, (split, update, key)


@pytest.mark.slow
def test_ranks_train_what_one_rank_trains(binarized_corpus: Path, run_training: Callable, tmp_path: Path) -> None:
    one, changed = tmp_path / "one", tmp_path / "changed"
    until_end = ["--max-update", str(LAST_UPDATE)]
    run_training(one, *FLAGS, "--update-freq", "4", *until_end, env=ON_CPU)
    epochs = [record["epoch"] for record in records(one, "train").values()]
    assert min(epochs) <= 1 < max(epochs), "no epoch ended on the way"
    # The control: parameters did move, and far more than the tolerance.
    assert (
        max(float(parameter.abs().max()) for parameter in checkpoint(one)["model"].values()) > 100 * PARAMETER_TOLERANCE
    )

    flags = [
        "--save-dir",
        str(changed),
        "--update-freq",
        "2",
        "--num-workers",
        "1",
        "--max-update",
        str(CHANGE_OF_RANKS),
    ]
    printed = run_command("fairseq_cli.train", [str(binarized_corpus), *TINY_RUN, *FLAGS, *flags], 2)
    assert "training on 2 devices" in printed
    refused = run_training(changed, *FLAGS, "--update-freq", "3", *until_end, env=ON_CPU, check=False)
    assert re.match(r"the checkpoint was written inside epoch 2 of a run with \d+ blocks per", refusal(refused))
    run_training(changed, *FLAGS, "--update-freq", "4", *until_end, env=ON_CPU)
    assert_same_run(changed, one)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "killed"), [(3, 1), (2, 0)])
def test_the_others_name_a_rank_that_was_killed(
    num_ranks: int, killed: int, binarized_corpus: Path, tmp_path: Path
) -> None:
    """Ranks that were started without torchrun, whose agent would end the others. With the first one their store is lost."""
    flags = ["--save-dir", str(tmp_path / "run"), "--max-update", "1000"]
    command = [sys.executable, "-m", "fairseq_cli.train", str(binarized_corpus), *TINY_RUN, *FLAGS, *flags]
    run = BackgroundRun(command, tmp_path / "run.log", num_ranks)
    run.wait_for_update(3)
    os.killpg(run.ranks[killed].pid, signal.SIGKILL)
    others = [rank for rank in range(num_ranks) if rank != killed]
    try:
        assert {run.ranks[rank].wait(120) for rank in others} == {1}
    finally:
        for rank in run.ranks:
            rank.kill_group()
    text = run.errors.read_text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "error:" in line]
    assert len(lines) == len(others)
    for line in lines:
        # A busy machine may need longer than the ten seconds in which a living rank is waited for: it is named as well.
        named = re.search(r"ranks? ([\d, ]+) ha(?:s|ve) ended or cannot be reached", line)
        # A rank that only waits for the first one notices the loss when that has ended, too, with the store of the ranks.
        assert {str(killed), "0"} & set(named.group(1).split(", ")), line


@pytest.mark.parametrize(
    ("flags", "env", "line"),
    [
        (["--distributed-world-size", "2"], {}, r"would train nothing: start it with 'torchrun --nproc-per-node 2"),
        ([], {"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 is in the environment but MASTER_ADDR"),
        (["--fp16"], {}, r"--fp16 needs a GPU"),
        (["--update-freq", "5000"], {}, r"train has \d+ blocks, fewer than the 80000"),
        (["--tokens-per-sample", "64"], {}, r"allows 32"),
    ],
)
def test_refused_launches(flags, env, line, binarized_corpus, tmp_path, monkeypatch, refused_training) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    arguments = [binarized_corpus, *TINY_RUN, "--distributed-world-size", "1", "--save-dir", tmp_path / "run", *flags]
    assert re.search(line, refused_training(*arguments))
    assert [path.name for path in (tmp_path / "run").rglob("*")] in ([], [".lock"]), "something was written"
    assert not distributed_utils.dist.is_initialized()
