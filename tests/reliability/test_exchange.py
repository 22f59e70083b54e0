"""What two gloo ranks exchange in an update of fairseq's trainer, counted in their traces.

Compared with the parameters of the model: each gradient travels once in an update, however many micro-batches it has, in
buckets that start before the last gradient is there: in the format of the model, or, as a sum of micro-batches, in float32.
"""

import json
import re
from pathlib import Path
from typing import Any

from fairseq import models
from tiny_runs import run_script

from amos_fairseq.flops import build_task
from amos_fairseq.recipes.composition import compose_recipe

# More than a bucket of 1 MiB, the smallest that fairseq lets one ask for.
SETTINGS = ["model.encoder_layers=6", "model.encoder_ffn_embed_dim=512", "dataset.batch_size=2"]
VOCABULARY = 200
UPDATES = 1  # after those that are not traced


def number_of_parameters() -> int:
    cfg = compose_recipe("amos_tiny", ["task.data=DATA", *SETTINGS])
    model = models.build_model(cfg.model, build_task(cfg.task, VOCABULARY))
    return sum(parameter.numel() for parameter in model.parameters())


def sums(path: Path) -> list[dict[str, Any]]:
    """Every sum over ranks of a trace as gloo marks it, in time."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((event for event in events if event.get("name") == "gloo:all_reduce"), key=lambda event: event["ts"])


def launched_before_the_last_gradient(path: Path) -> int:
    """Sums of gradients that a node of autograd started while others had still to run."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    nodes = [event["ts"] for event in events if "AccumulateGrad" in event["name"]]
    return sum(event["name"] == "c10d::allreduce_" and event["ts"] < max(nodes) for event in events)


def test_gradients_travel_once_in_an_update(tmp_path: Path) -> None:
    flags = ["--set", *SETTINGS, "distributed_training.bucket_cap_mb=1", "--update-freq", "1", "3"]
    flags += ["--precision", "bf16", "--vocabulary-size", str(VOCABULARY), "--updates", str(UPDATES)]
    result = run_script("examples/benchmark/ranks.sh", tmp_path, tmp_path, "amos_tiny", *flags)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    expected = number_of_parameters()
    for update_freq, dtype in ((1, "c10::BFloat16"), (3, "float")):
        for rank in range(2):
            (path,) = tmp_path.glob(f"*_freq{update_freq}_rank{rank}.json")
            exchanges = [(event["args"]["Input type"][0], event["args"]["Input Dims"][0][0]) for event in sums(path)]
            gradients = [number for name, number in exchanges if name == dtype]
            assert sum(gradients) == UPDATES * expected
            assert len(gradients) > UPDATES
            # Beside them, in float64: statistics that the host holds, those of the device, and a norm of each rank.
            others = [number for name, number in exchanges if name == "double"]
            assert len(others) == 3 * UPDATES
            assert others[2::3] == [2] * UPDATES
            assert len(exchanges) == len(gradients) + len(others)
            assert launched_before_the_last_gradient(path) >= len(gradients) - UPDATES
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert result.stdout.startswith(text)
    row = re.search(r"^\| 3, rank 1 \|(.*)\|$", text, flags=re.MULTILINE)[1].split(" | ")
    assert row[2:4] == [str(len(gradients) // UPDATES), str(round(4 * expected / 1e6, 1))]
    assert row[7].strip() == "3"
