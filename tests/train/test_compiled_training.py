"""``--compile`` in real runs, by hand: what they train, and how they continue."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
from forked_command import run_command
from interrupted_run import assert_same_run, checkpoint, killed_at, records
from tiny_runs import TINY_RUN

# One layer: tests/modules/test_compilation.py compiles each objective. Four updates of 16 blocks in micro-batches of 4, all on
# one rank, or 8 on each of two: all graphs are for one size.
FLAGS = shlex.split(
    "--arch mlm_tiny --criterion mlm --encoder-layers 1 --dropout 0 --attention-dropout 0 --batch-size 4 --max-update 4 "
    "--save-interval-updates 2 --validate-interval-updates 4"
)
# fairseq rounds what it logs to 3 digits; compiled sums, and those over ranks, have another order.
LOSS_TOLERANCE = 2e-3
pytestmark = [
    pytest.mark.by_hand,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"),
]


def assert_close_losses(save_dir: Path, reference: Path) -> None:
    for found, expected in zip(records(save_dir), records(reference), strict=True):
        assert (found["split"], found["update"]) == (expected["split"], expected["update"])
        assert abs(found["loss"] - expected["loss"]) < LOSS_TOLERANCE * expected["loss"]


def test_compiled_layers_train_what_eager_layers_train(binarized_corpus: Path, tmp_path: Path) -> None:
    """Also on two ranks, and a compiled run that is continued halfway ends in the same bits (dropout: test_compilation.py)."""

    def train(name: str, *flags: str, num_ranks: int = 1) -> str:
        arguments = [str(binarized_corpus), *TINY_RUN, *FLAGS, "--save-dir", str(tmp_path / name)]
        arguments += ["--update-freq", str(4 // num_ranks), *flags]
        # Only the first run compiles, the others load its results from this folder.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        return run_command("fairseq_cli.train", arguments, num_ranks, env=cache)

    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    train("eager")
    text = train("compiled", "--compile")
    assert "compiling the encoder's layers: the first updates take about a minute longer" in text
    assert_close_losses(compiled, eager)
    assert checkpoint(compiled)["model"].keys() == checkpoint(eager)["model"].keys()
    continued = killed_at(2, compiled, tmp_path / "continued")
    train("continued", "--compile")
    assert_same_run(continued, compiled)
    text = train("two ranks", "--compile", num_ranks=2)
    assert "training on 2 devices" in text
    assert text.count("compiling the encoder's layers") == 1
    assert_close_losses(tmp_path / "two ranks", eager)
