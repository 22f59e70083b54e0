"""``examples/pretraining/two_stage.sh``: a masked language model, then a discriminator from its weights and its samples."""

import shlex
from pathlib import Path

import pytest
import torch
from failures import refusal
from tiny_runs import run_script

from amos_fairseq.checkpoints.read import read_state, weights_sha256
from amos_fairseq.run.metrics_file import read_records

SMALLER = shlex.split(
    "task.tokens_per_sample=32 model.max_positions=32 model.encoder_embed_dim=32 model.dropout=0.1 "
    "model.encoder_ffn_embed_dim=64 dataset.batch_size=16 dataset.num_workers=0 lr_scheduler.warmup_updates=2 "
    "common.log_interval=1 dataset.validate_interval_updates=4 "
    "distributed_training.distributed_world_size=1"
)


SCRIPT = "examples/pretraining/two_stage.sh"


def weights_of(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    state = read_state(checkpoint)
    assert state["optimizer_history"][-1]["num_updates"] == 4
    return {key.removeprefix(prefix): value for key, value in state["model"].items() if key.startswith(prefix)}


@pytest.mark.slow
def test_both_stages(binarized_corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "two stages, whole"
    done = run_script(SCRIPT, tmp_path, "tiny", binarized_corpus, out, "4", *SMALLER)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = (out / stage / "checkpoint_last.pt" for stage in ("generator", "discriminator"))

    # The second stage's checkpoint has no generator, but names its file; the discriminator has moved away from its weights.
    state = read_state(second)
    assert state["task_state"]["generator_sha256"] == weights_sha256(read_state(first)["model"])
    assert {name.partition(".")[0] for name in state["model"]} == {"embed_tokens", "discriminator", "detection_head"}
    generator, discriminator = weights_of(first, "transformer."), weights_of(second, "discriminator.")
    moved = {name: (discriminator[name] - value).abs().max().item() for name, value in generator.items()}
    assert all(0 < step < 0.01 for name, step in moved.items()), moved  # four updates of at most 0.002 each

    # A schedule of its own: both warm up from 0 to the same peak in their first two updates.
    stages = [read_records(out / stage) for stage in ("generator", "discriminator")]
    rates = [[record["lr"] for record in stage if record["split"] == "train"] for stage in stages]
    assert rates[0] == rates[1]
    assert len(rates[1]) == 4
    assert max(rates[1]) == pytest.approx(0.002)
    last = stages[1][-1]
    assert {"rtd_loss", "rtd_auc", "mlm_loss_2", "generator_temperature"} <= last.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huge", "DATA", "OUT", "4"], "there is no size 'huge': give tiny, small, base or large"),
        (["tiny", "absent", "OUT", "4"], "absent contains no binarized corpus (dict.txt)"),
        (["tiny", "DATA", "BEGUN", "4"], "was started with SIZE and UPDATES tiny 9: give these, or another SAVE_DIR"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(arguments, message, tmp_path, binarized_corpus) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "two_stage.txt").write_text("tiny 9\n")
    places = {"DATA": str(binarized_corpus), "OUT": str(tmp_path / "out"), "BEGUN": str(begun)}
    done = run_script(SCRIPT, tmp_path, *(places.get(argument, argument) for argument in arguments))
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert message in refusal(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun"]
    assert [path.name for path in begun.iterdir()] == ["two_stage.txt"]
