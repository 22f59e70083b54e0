"""Runs with phases: stopped around each border, on one rank and on two, they are the run left alone; what they log."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.sgd import SGD
from interrupted_run import assert_same_bits, assert_same_run, checkpoint, flags_command, killed_at, records, run_to_end
from omegaconf import OmegaConf
from synthetic_corpus import make_task

from amos_fairseq.data.phases import read_phases
from amos_fairseq.optim.warmup_stable_decay import WarmupStableDecay, WarmupStableDecayConfig
from amos_fairseq.run.schedule import due_phase

# Of float32 parameters after sums in another order: see tests/train/test_family_ranks_and_resume.py.
PARAMETER_TOLERANCE = 5e-5
LAST_UPDATE, BORDERS = 30, (9, 21)
WEIGHT = torch.nn.Parameter(torch.zeros(1))
# The synthetic corpus has about 17 updates of 512 tokens an epoch: the second border is in the second epoch.
PHASES = "[{length: 8, share: 0.3, batch_size: 32}, {length: 16, share: 0.4}, {length: 32, share: 0.3, batch_size: 8}]"
FLAGS = ["--phases", PHASES, "--batch-size", "16", "--max-update", str(LAST_UPDATE)]
FLAGS += ["--validate-interval-updates", "10"]


def command(data: Path, save_dir: Path, *flags: str) -> list[str]:
    return flags_command(data, save_dir, *FLAGS, "--save-interval-updates", "1", *flags)


@pytest.fixture(scope="module")
def whole(binarized_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two micro-batches an update."""
    save_dir = tmp_path_factory.mktemp("whole")
    run_to_end(command(binarized_corpus, save_dir, "--update-freq", "2"), save_dir.with_suffix(".log"))
    return save_dir


@pytest.mark.slow
@pytest.mark.parametrize(("update", "workers"), [(BORDERS[0] - 1, "2"), (BORDERS[1], "0")])
def test_killed_around_a_border_and_resumed_is_uninterrupted(
    update: int, workers: str, whole: Path, binarized_corpus: Path, tmp_path: Path
) -> None:
    """Tests of the iterator stop at more updates."""
    save_dir = killed_at(update, whole, tmp_path / "run")
    flags = ["--update-freq", "2", "--num-workers", workers]
    run_to_end(command(binarized_corpus, save_dir, *flags), tmp_path / "resumed.log")
    assert_same_run(save_dir, whole)
    assert "instead of" not in (tmp_path / "resumed.log").read_text(encoding="utf-8")  # warnings of other batches


@pytest.mark.slow
def test_two_ranks_go_through_the_phases_of_one(whole: Path, binarized_corpus: Path, tmp_path: Path) -> None:
    """From before the second border on; sums of gradients are in another order."""
    save_dir = killed_at(BORDERS[1] - 2, whole, tmp_path / "run")
    module = command(binarized_corpus, save_dir)
    run_to_end(module, tmp_path / "ranks.log", 2)
    expected, found = checkpoint(whole), checkpoint(save_dir)
    for name, parameter in found["model"].items():
        assert (parameter - expected["model"][name]).abs().max() < PARAMETER_TOLERANCE, name
    assert_same_bits(*(each["extra_state"]["train_iterator"]["phase_start"] for each in (found, expected)), "")


@pytest.mark.slow
def test_the_log_of_a_run_with_phases(whole: Path) -> None:
    """Lengths of blocks, tokens of an update, epochs that grow; validation has the longest blocks throughout."""
    logged = records(whole)
    train = [record for record in logged if record["split"] == "train"]
    lengths = [record["tokens_per_block"] for record in train]
    assert lengths == [8] * BORDERS[0] + [16] * (BORDERS[1] - BORDERS[0]) + [32] * (LAST_UPDATE - BORDERS[1])
    assert all(record["wpb"] == 512 for record in train if record["update"] - 1 not in (BORDERS[1], 16, 17))
    epochs = [record["epoch"] for record in train]
    assert epochs == sorted(epochs)
    assert 0 < epochs[0] < 0.1
    assert 1 < epochs[BORDERS[1]] < epochs[-1] < 2
    positions = checkpoint(whole, f"checkpoint_1_{BORDERS[0]}.pt")["model"]["discriminator.embed_positions.weight"]
    assert torch.equal(positions[8:], positions[:-8])  # copies until the first border
    (shape,) = {(record["wpb"], record["bsz"]) for record in logged if record["split"] == "valid"}
    assert shape[0] > 20 * shape[1]


def test_the_phase_of_an_update_follows_updates_or_time_and_a_branch_has_the_last() -> None:
    phases = read_phases(PHASES, 32, 0.15)
    cfg = WarmupStableDecayConfig(lr=[1.0], minutes=1.0)
    sgd = SGD(OmegaConf.create({"lr": [1.0], "momentum": 0.0, "weight_decay": 0.0}), [WEIGHT])
    schedule = WarmupStableDecay(cfg, sgd)
    trainer = SimpleNamespace(lr_scheduler=schedule, task=SimpleNamespace(phases=phases), get_num_updates=lambda: 9)
    trainer.cfg = OmegaConf.create({"optimization": {"max_update": LAST_UPDATE}})
    # Borders after 0.3 and 0.7 of a minute.
    for schedule.seconds, phase in ((0.0, 0), (17.9, 0), (18.0, 1), (41.9, 1), (42.0, 2), (59.0, 2)):
        assert due_phase(trainer) == phase
    schedule.seconds = 0.0
    cfg.decay_from = "checkpoint_1_5.pt"  # known before the checkpoint is read, for which the first batches are cut
    assert due_phase(trainer) == 2
    cfg.decay_from, schedule.decay_start = None, 5  # with flags, which can be left out later
    assert due_phase(trainer) == 2
    trainer.lr_scheduler = None  # one of fairseq: by updates
    assert due_phase(trainer) == 1


def test_the_losses_have_the_share_of_masked_tokens_of_their_phase(binarized_corpus: Path) -> None:
    """ceil(mask_prob T) / T."""
    phases = "[{length: 8, share: 0.5, mask_prob: 0.3}, {length: 32, share: 0.5}]"
    task = make_task(binarized_corpus, tokens_per_sample=32, phases=phases)
    for number, share in ((0, 3 / 8), (1, 5 / 32)):
        task.phase_iterator = SimpleNamespace(phase=number)
        task.before_step({}, None, 1)
        assert task.masked_share == share


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--phases '[{length: 8, share: 1}]'", "must be the longest, and have the tokens_per_sample of the run, 32"),
        ("--tokens-per-sample 64 --phases '[{length: 64, share: 1}]'", "64 tokens, and the model --max-positions 32"),
        ("--max-update 0 --max-epoch 1", "are shares of --max-update or --minutes: give one"),
        ("--max-update 2", "a phase has no update of the 2"),
        ("--valid-subset valid,train", "leave train out of --valid-subset"),
        ("--sample-break-mode complete", "need full blocks: leave out --sample-break-mode complete"),
        (
            "--arch electric_tiny --criterion electric --phases '[{length: 32, share: 1, mask_prob: 0.2}]'",
            "the noise of electric has one mask_prob",
        ),
    ],
)
def test_refusals(flags: str, line: str, binarized_corpus: Path, refused_training, tmp_path: Path) -> None:
    words = flags_command(binarized_corpus, tmp_path / "run", *FLAGS, *shlex.split(flags))
    assert line in refused_training(*words[3:])
