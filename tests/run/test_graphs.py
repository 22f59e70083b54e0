"""Updates that are captured as CUDA graphs, on a CPU: a function in place of a graph beside fairseq's path, bit for bit.

It shows that everything around a graph is that of fairseq: batches, noise, statistics, logs, saves. Kernels and their replay
need a GPU (examples/benchmark/gpu/correct.py graphs), and tests/cuda/test_graphs.py looks at what a graph would contain.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eager_graphs
import pytest
import torch
from fairseq.logging import metrics
from interrupted_run import assert_same_bits, assert_same_run, flags_command, killed_at, run_to_end
from omegaconf import OmegaConf
from training_step import EagerGraph, FairseqStep, random_batches, set_up

from amos_fairseq.errors import UserError
from amos_fairseq.flops import read_configuration
from amos_fairseq.run.graphs import WARM_UP, GraphedUpdates, refusal

UPDATES = 14
PADDED, SMALLER = (1, 6, 11), (7,)  # of these updates


def step_of(recipe: str, precision: str = "bf16") -> tuple[FairseqStep, list[dict[str, Any]]]:
    """A trainer of a small model, and the batches of its updates."""
    name, *settings = recipe.split()
    sizes = [
        "dataset.batch_size=3",
        "task.tokens_per_sample=24",
        "model.max_positions=24",
        "lr_scheduler.warmup_updates=4",
    ]
    metrics.reset()
    setup = set_up(name, [*sizes, *settings], precision=precision, device="cpu", vocabulary_size=200)
    blocks = [torch.arange(10, 10 + length) for length in (23, 23, 9)]
    dataset = setup.task.mask_blocks(blocks, training=True, source="a test")
    padded, smaller = (dataset.collater([dataset[index] for index in range(size)]) for size in (3, 1))
    batches = random_batches(setup, UPDATES)
    for updates, batch in ((PADDED, padded), (SMALLER, smaller)):
        for update in updates:
            batches[update] = batch
    return FairseqStep(setup), batches


def trained(recipe: str, precision: str, graphed: bool) -> tuple[list[Any], Any]:
    """What each update logs and the state behind the last one; how many updates were replayed."""
    step, batches = step_of(recipe, precision)
    EagerGraph.replays = 0
    if graphed:
        step.trainer.graphed_updates = GraphedUpdates(step.trainer, EagerGraph)
    logged = []
    for batch in batches:
        with metrics.aggregate(new_root=True) as meters:
            logged += [step.trainer.train_step([batch]), meters.get_smoothed_values()]
    for values in logged:
        for key in ("ups", "train_wall"):
            values.pop(key, None)
    parts = step.trainer.get_model(), step.trainer.optimizer, step.trainer.lr_scheduler
    return [logged, *(part.state_dict() for part in parts)], EagerGraph.replays


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("electra_tiny", "bf16"),
        ("electra_tiny", "float32"),
        ("amos_tiny model.mixture=random_layer model.dropout=0.1", "bf16"),
        ("electra_modern_mini model.encoder_layers=2", "bf16"),
        ("teams_tiny", "bf16"),
        ("electric_tiny", "bf16"),
        ("mlm_tiny task.mask_treatment=bert", "float32"),
    ],
)
def test_an_update_has_the_bits_of_fairseqs(recipe: str, precision: str) -> None:
    """Weights, masters, moments, logged values; padded and smaller batches between take fairseq's path in both."""
    expected, _ = trained(recipe, precision, graphed=False)
    actual, replays = trained(recipe, precision, graphed=True)
    assert replays == UPDATES - WARM_UP - len(PADDED) - len(SMALLER)
    assert_same_bits(actual, expected, recipe)


@pytest.mark.slow
def test_a_run_with_phases_validation_and_saves_also_resumed(binarized_corpus: Path, tmp_path: Path) -> None:
    """A new phase is a new kind of batch, and learned positions of short blocks train their copies."""
    phases = "[{length: 8, share: 0.5, batch_size: 16}, {length: 32, share: 0.5, batch_size: 4}]"
    flags = ["--phases", phases, "--bf16", "--max-update", "16", "--save-interval-updates", "1", "--cuda-graphs"]
    flags += ["--validate-interval-updates", "6"]

    def train(save_dir: Path, script: list[str]) -> str:
        command = flags_command(binarized_corpus, save_dir, *flags)
        return run_to_end([sys.executable, *script, *command[3:]], tmp_path / f"{save_dir.name}.log")

    eager = [str(Path(eager_graphs.__file__))]
    stock = train(tmp_path / "stock", ["-m", "fairseq_cli.train"])
    assert "model.cuda_graphs has no effect: no update is captured on a CPU" in stock
    # Not the first three of each phase, nor the padded batch with which the second one begins.
    assert "9 updates replayed" in train(tmp_path / "graphed", eager)
    assert_same_run(tmp_path / "graphed", tmp_path / "stock")
    killed = killed_at(4, tmp_path / "graphed", tmp_path / "killed")
    assert "5 updates replayed" in train(killed, eager)
    assert_same_run(killed, tmp_path / "stock")


def test_a_graph_belongs_to_a_kind_of_batch() -> None:
    """Two phases may have blocks of one length, and learned positions that repeat or do not."""
    step, batches = graphed_step("electra_tiny")
    graphed, keys = step.trainer.graphed_updates, []
    for phase, period in ((None, 0), (0, 0), (1, 0), (1, 8)):
        step.trainer.task.phase_iterator = None if phase is None else SimpleNamespace(phase=phase)
        graphed.positions[0].period = period
        keys.append(graphed.key(batches[0]))
    assert all(keys.count(key) == 1 for key in keys)
    assert keys[-1] == graphed.key(batches[1])


def graphed_step(recipe: str = "mlm_tiny", capture: Any = EagerGraph) -> tuple[FairseqStep, list[dict[str, Any]]]:
    step, batches = step_of(recipe)
    step.trainer.graphed_updates = GraphedUpdates(step.trainer, capture)
    return step, [batch for update, batch in enumerate(batches) if update not in (*PADDED, *SMALLER)]


def test_a_loss_that_is_not_finite_is_named() -> None:
    step, batches = graphed_step()
    for update in range(WARM_UP + 1):
        step.step(batches[update])
    with torch.no_grad():
        step.module.mlm_head.bias.fill_(float("nan"))
    with pytest.raises(UserError, match=r"update 5: the gradient is not finite \(mlm_loss_2 = nan; no loss scale\)"):
        step.step(batches[-1])


def test_a_capture_that_fails_ends_the_run_with_one_line() -> None:
    """A checkpoint written on the way out has rates that are numbers."""

    def fail(work: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step, batches = graphed_step(capture=fail)
    for update in range(WARM_UP):
        step.step(batches[update])
    expected = r"\(operation not permitted when stream is capturing\): train with model.cuda_graphs=false"
    with pytest.raises(UserError, match=expected):
        step.step(batches[-1])
    assert all(type(group["lr"]) is float for group in step.trainer.optimizer.optimizer.param_groups)


REFUSALS = {
    "common.fp16=true": "with --fp16",
    "common.empty_cache_freq=10": "with common.empty_cache_freq",
    "task.sample_break_mode=complete": "with task.sample_break_mode",
    "optimization.update_freq=[1,2]": "with optimization.update_freq above 1",
    "task._name=squad": "for another task than text_pretraining",
    "optimizer._name=adam": "with another optimizer than grouped_adam",
    "optimizer.bias_correction=false": "without bias correction",
    "model.activation_checkpointing=true": "with model.activation_checkpointing",
    "+model.gumbel_entries=0": "with model.gumbel_entries=0",
    "+model.generator_temperature_start=2.0": "with model.generator_temperature_start",
    "+model.mixture=layer_switch": "with model.mixture=layer_switch",
    "ema.store_ema=true": "with an average of the weights",
}


@pytest.mark.parametrize("setting", [*REFUSALS, "two ranks", "a CPU", "nothing"])
def test_what_is_not_captured(setting: str) -> None:
    cfg, _ = read_configuration("amos_tiny", [])
    on_gpu = {"cuda": setting != "a CPU", "data_parallel_world_size": 2 if setting == "two ranks" else 1}
    if setting in REFUSALS:
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([setting.lstrip("+")]))
    reason = refusal(SimpleNamespace(cfg=cfg, **on_gpu))
    expected = REFUSALS | {"two ranks": "on several ranks", "a CPU": "on a CPU"}
    assert reason is None if setting == "nothing" else reason.startswith(expected[setting])
