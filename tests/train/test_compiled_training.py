"""``--compile`` and ``--activation-checkpointing`` in real runs: what they train, how they continue, how they refuse."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_command import run_command
from interrupted_run import (
    BackgroundRun,
    assert_same_run,
    checkpoint,
    flags_command,
    num_updates,
    records,
    uninterrupted,
)
from tiny_runs import TINY_RUN

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)
# Only the first run of a session compiles, the others find its results here.
CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Layers of one kind, where AMOS has three to compile.
MLM = ["--arch", "mlm_tiny", "--criterion", "mlm"]
NO_DROPOUT = ["--dropout", "0", "--attention-dropout", "0"]
# fairseq rounds what it logs to 3 digits; compiled sums have another order.
LOSS_TOLERANCE = 2e-3


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {CACHE: str(tmp_path_factory.mktemp("compiled"))}


def assert_close_losses(save_dir: Path, reference: Path) -> None:
    for found, expected in zip(records(save_dir), records(reference), strict=True):
        assert (found["split"], found["update"]) == (expected["split"], expected["update"])
        assert abs(found["loss"] - expected["loss"]) < LOSS_TOLERANCE * expected["loss"]


@needs_compiler
def test_compiled_layers_train_what_layers_as_written_train(
    run_training: Callable, cache: dict[str, str], tmp_path: Path
) -> None:
    """The same samples are drawn as long as no rounding decides about one; a checkpoint knows nothing of it."""
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    run_training(plain, *NO_DROPOUT)
    done = run_training(compiled, *NO_DROPOUT, "--compile", env=cache)
    assert "compiling the encoder's layers: the first updates take about a minute longer" in done.stdout + done.stderr
    assert re.search(r"compiled for \d+ seconds in update 1\b", done.stdout + done.stderr)
    assert_close_losses(compiled, plain)
    assert checkpoint(compiled)["model"].keys() == checkpoint(plain)["model"].keys()


@needs_compiler
def test_a_compiled_run_continues_to_the_same_bits(
    run_training: Callable, cache: dict[str, str], tmp_path: Path
) -> None:
    """In bfloat16, with dropout, and with layers that are computed again."""
    flags = [*MLM, "--compile", "--activation-checkpointing", "--bf16", "--validate-interval-updates", "3"]
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    for save_dir, updates in ((halves, "3"), (halves, "6"), (whole, "6")):
        run_training(save_dir, *flags, "--save-interval-updates", "3", "--max-update", updates, env=cache)
    assert_same_run(halves, whole)


def test_layers_that_are_computed_again_train_the_same_bits(
    binarized_corpus: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Killed and continued, in bfloat16, against the run without the flag that was left alone."""
    save_dir = tmp_path / "run"
    command = flags_command(binarized_corpus, save_dir, "--bf16", "--activation-checkpointing")
    run = BackgroundRun(command, tmp_path / "killed.log")
    run.wait_for_update(21)
    run.kill()
    assert num_updates(save_dir) >= 15
    again = BackgroundRun(command, tmp_path / "again.log")
    assert again.exit_code() == 0, again.text()[-3000:]
    assert_same_run(save_dir, uninterrupted(binarized_corpus, tmp_path_factory, "--bf16"))


def train_on_two_ranks(data: Path, save_dir: Path, *flags: str, env: dict[str, str]) -> str:
    arguments = [str(data), *TINY_RUN, "--batch-size", "8", "--max-update", "4", "--save-dir", str(save_dir), *flags]
    text = run_command("fairseq_cli.train", arguments, num_ranks=2, env=env)
    assert "training on 2 devices" in text
    return text


@needs_compiler
def test_two_ranks_train_with_both(binarized_corpus: Path, cache: dict[str, str], tmp_path: Path) -> None:
    """They accumulate two micro-batches an update, so that gradients are exchanged in one backward pass of two."""
    plain, again, compiled = (tmp_path / name for name in ("plain", "again", "compiled"))
    common, both = [*MLM, *NO_DROPOUT, "--update-freq", "2"], ["--activation-checkpointing", "--compile"]
    for save_dir, flags in ((plain, []), (again, both[:1]), (compiled, both)):
        text = train_on_two_ranks(binarized_corpus, save_dir, *common, *flags, env=cache)
        assert text.count("compiling the encoder's layers") == (save_dir == compiled)
    assert_same_run(again, plain)
    assert_close_losses(compiled, plain)


@pytest.mark.parametrize("compiler", ["/nonexistent", "/bin/false"])
def test_without_a_compiler_one_line_says_so_before_training(
    compiler: str, run_training: Callable, tmp_path: Path
) -> None:
    save_dir = tmp_path / "run"
    refused = run_training(save_dir, "--compile", check=False, env={"CXX": compiler, CACHE: str(tmp_path / "empty")})
    assert refused.returncode == 1
    (line,) = [line for line in refused.stderr.splitlines() if "error:" in line]
    assert line.startswith("amos_fairseq: error: model.compile=true does not work on this machine (")
    assert "install a C++ compiler (g++ or clang++; CXX names another one), or train with model.compile=false" in line
    assert "Traceback" not in refused.stderr + refused.stdout
    assert not list(save_dir.rglob("*.pt"))
