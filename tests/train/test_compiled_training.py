"""``--compile`` and ``--activation-checkpointing`` in real runs: what they train, how they continue, how they refuse."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_command import run_command
from interrupted_run import assert_same_run, checkpoint, records
from tiny_runs import TINY_RUN

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)
# Only the first run of a test compiles, the others load its results from this folder.
CACHE = "TORCHINDUCTOR_CACHE_DIR"
NO_DROPOUT = ["--dropout", "0", "--attention-dropout", "0"]
# fairseq rounds what it logs to 3 digits; compiled sums have another order.
LOSS_TOLERANCE = 2e-3


def assert_close_losses(save_dir: Path, reference: Path) -> None:
    for found, expected in zip(records(save_dir), records(reference), strict=True):
        assert (found["split"], found["update"]) == (expected["split"], expected["update"])
        assert abs(found["loss"] - expected["loss"]) < LOSS_TOLERANCE * expected["loss"]


@needs_compiler
def test_compiled_layers_train_what_eager_layers_train(
    run_training: Callable, binarized_corpus: Path, tmp_path: Path
) -> None:
    """On one rank, and on two that accumulate two micro-batches, so that one backward pass of two exchanges gradients.

    A compiled run that is continued halfway ends in the same bits (with dropout: tests/modules/test_compilation.py). Samples
    are the same as long as no rounding changes one; a checkpoint is the same with and without compilation.
    """
    cache = {CACHE: str(tmp_path / "cache")}  # the other runs load what the first one compiled
    eager, compiled, continued = tmp_path / "eager", tmp_path / "compiled", tmp_path / "continued"
    saved = [*NO_DROPOUT, "--save-interval-updates", "3"]
    run_training(eager, *saved)
    done = run_training(compiled, *saved, "--compile", env=cache)
    assert "compiling the encoder's layers: the first updates take about a minute longer" in done.stdout + done.stderr
    assert re.search(r"compiled for \d+ seconds in update 1\b", done.stdout + done.stderr)
    assert_close_losses(compiled, eager)
    assert checkpoint(compiled)["model"].keys() == checkpoint(eager)["model"].keys()

    shutil.copytree(compiled, continued, ignore=shutil.ignore_patterns("checkpoint_best.pt", ".lock"))
    (halfway,) = continued.glob("checkpoint_*_3.pt")
    halfway.replace(continued / "checkpoint_last.pt")
    run_training(continued, *saved, "--compile", env=cache)
    assert_same_run(continued, compiled)

    common = [str(binarized_corpus), *TINY_RUN, *NO_DROPOUT, "--update-freq", "2", "--max-update", "4"]
    eager, recomputed, compiled = (tmp_path / f"two_ranks_{name}" for name in ("eager", "recomputed", "compiled"))
    for save_dir, flags in ((eager, []), (recomputed, ["--activation-checkpointing"]), (compiled, ["--compile"])):
        arguments = [*common, *flags, "--save-dir", str(save_dir)]
        text = run_command("fairseq_cli.train", arguments, num_ranks=2, env=cache)
        assert "training on 2 devices" in text
        assert text.count("compiling the encoder's layers") == (save_dir == compiled)
    assert_same_run(recomputed, eager)
    assert_close_losses(compiled, eager)
