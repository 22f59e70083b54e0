"""Single parts of a step: fast and reference implementations run, and the FLOPs equal PyTorch's count."""

import torch

from amos_fairseq.measure.configuration import BenchSettings, BenchSetup, build_task, set_up
from amos_fairseq.measure.fairseq_step import make_synthetic_text
from amos_fairseq.measure.flops import count_matmuls
from amos_fairseq.measure.micro_benchmarks import WAYS, MicroBenchmark, all_micro_benchmarks, time_micro_benchmark


def pieces_of(recipe: str, *overrides: str) -> tuple[BenchSetup, dict[str, MicroBenchmark]]:
    settings = BenchSettings(recipe, ["dataset.batch_size=2", *overrides], precision="float32")
    setup = set_up(settings, 600)
    task = build_task(setup.cfg.task, setup.vocabulary_size)
    pieces = all_micro_benchmarks(setup, task, make_synthetic_text(task, 2).batches[0])
    return setup, {piece.name: piece for piece in pieces}


def test_flops_are_those_that_pytorch_counts() -> None:
    """PyTorch counts products, but not the fused attention of the CPU."""
    _, pieces = pieces_of("amos_tiny")
    for name in ("attention with a learned bias", "output layer"):
        assert count_matmuls(pieces[name].ways["reference"]) == pieces[name].flops > 0


def test_every_piece_of_amos_runs() -> None:
    _, pieces = pieces_of("amos_tiny")
    output_layers = ["output layer", "sampling", "output layer, mixture, its gradient"]
    assert list(pieces) == ["attention with a learned bias", *output_layers, "optimizer"]
    for piece in pieces.values():
        timed = time_micro_benchmark(piece, torch.device("cpu"), 1e6, 1e3, progress=lambda text: None, seconds=0.0)
        assert timed.floor == max(piece.flops / 1e6, piece.bytes / 1e3) > 0
        assert list(timed.seconds) == list(WAYS)
        assert min(timed.seconds.values()) > 0


def test_pieces_of_a_recipe() -> None:
    assert list(pieces_of("mlm_tiny")[1]) == ["attention", "output layer", "optimizer"]
    assert list(pieces_of("amos_tiny", "model.mixture=uniform")[1])[-2:] == ["sampling", "optimizer"]


def test_samples_are_tokens() -> None:
    """All are rows of the vocabulary, and positions have different ones."""
    _, pieces = pieces_of("electra_tiny")
    (fast,), reference = (pieces["sampling"].ways[way]() for way in WAYS)
    for sampled in (fast, reference):
        assert sampled.shape == (20,)
        assert 0 <= sampled.min() <= sampled.max() < 640
        assert len(sampled.unique()) > 10


def test_optimizers_take_equal_steps() -> None:
    """One step from equal weights with equal gradients; the loop decays every weight, so without decay."""
    _, pieces = pieces_of("mlm_tiny", "optimizer.weight_decay=0")
    ours, loop = (pieces["optimizer"].ways[way] for way in WAYS)
    ours(), loop()
    mine = [parameter for group in ours.__self__.param_groups for parameter in group["params"]]
    other = loop.__self__.param_groups[0]["params"]
    assert sum(parameter.numel() for parameter in mine) * 28 == pieces["optimizer"].bytes
    for expected in other:
        assert any(expected.shape == found.shape and torch.allclose(expected, found) for found in mine)
