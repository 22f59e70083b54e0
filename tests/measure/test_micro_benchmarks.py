"""Single parts of a step: fast and reference implementations run, and the FLOPs equal PyTorch's count."""

import torch

from amos_fairseq.measure.configuration import BenchSettings, build_task, set_up
from amos_fairseq.measure.fairseq_step import make_synthetic_text
from amos_fairseq.measure.micro_benchmarks import WAYS, MicroBenchmark, all_micro_benchmarks, time_micro_benchmark
from amos_fairseq.training_flops import count_matmuls


def benchmarks_of(recipe: str, *overrides: str) -> dict[str, MicroBenchmark]:
    settings = BenchSettings(recipe, ["dataset.batch_size=2", *overrides], precision="float32", vocabulary_size=600)
    setup = set_up(settings)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    batch = make_synthetic_text(task, 2).batches[0]
    return {benchmark.name: benchmark for benchmark in all_micro_benchmarks(setup, task, batch)}


def test_flops_are_those_that_pytorch_counts() -> None:
    """PyTorch counts products, but not the fused attention of the CPU."""
    benchmarks = benchmarks_of("amos_tiny")
    for name in ("attention with a learned bias", "output layer"):
        assert count_matmuls(benchmarks[name].ways["reference"]) == benchmarks[name].flops > 0


def test_every_benchmark_of_amos_runs() -> None:
    benchmarks = benchmarks_of("amos_tiny")
    output_layers = ["output layer", "sampling", "output layer, mixture, its gradient"]
    assert list(benchmarks) == ["attention with a learned bias", *output_layers, "optimizer"]
    for benchmark in benchmarks.values():
        timed = time_micro_benchmark(benchmark, torch.device("cpu"), 1e6, 1e3, progress=lambda text: None, seconds=0.0)
        assert timed.floor == max(benchmark.flops / 1e6, benchmark.bytes / 1e3) > 0
        assert list(timed.seconds) == list(WAYS)
        assert min(timed.seconds.values()) > 0


def test_benchmarks_of_a_recipe() -> None:
    assert list(benchmarks_of("mlm_tiny")) == ["attention", "output layer", "optimizer"]
    assert list(benchmarks_of("amos_tiny", "model.mixture=uniform"))[-2:] == ["sampling", "optimizer"]


def test_samples_are_tokens() -> None:
    """All are rows of the vocabulary, and positions have different ones."""
    benchmarks = benchmarks_of("electra_tiny")
    (fast,), reference = (benchmarks["sampling"].ways[way]() for way in WAYS)
    for sampled in (fast, reference):
        assert sampled.shape == (20,)
        assert 0 <= sampled.min() <= sampled.max() < 640
        assert len(sampled.unique()) > 10


def test_optimizers_take_equal_steps() -> None:
    """One step from equal weights with equal gradients; the loop decays every weight, so without decay."""
    benchmarks = benchmarks_of("mlm_tiny", "optimizer.weight_decay=0")
    ours, loop = (benchmarks["optimizer"].ways[way] for way in WAYS)
    ours(), loop()
    mine = [parameter for group in ours.__self__.param_groups for parameter in group["params"]]
    other = loop.__self__.param_groups[0]["params"]
    assert sum(parameter.numel() for parameter in mine) * 28 == benchmarks["optimizer"].bytes
    for expected in other:
        assert any(expected.shape == found.shape and torch.allclose(expected, found) for found in mine)
