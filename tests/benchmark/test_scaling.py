"""The arithmetic of examples/benchmark/scaling.py against values by hand."""

import re

import pytest
from benchmark import scaling
from failures import error_line
from tiny_runs import ROOT

MIB = 2**20


@pytest.mark.parametrize(
    ("num_nodes", "gpus_per_node", "size", "seconds"),
    [
        (1, 1, 8e9, 0.0),
        # 14 steps, each moving an eighth of the bytes at 200 GB/s after 2 us.
        (1, 8, 8e9, 14 * (1e9 / 200e9 + 2e-6)),
        # Two nodes of one GPU: half of the bytes there and half back, at 85 % of 25 GB/s after 5 us each.
        (2, 1, 42.5e9, 2 * (21.25e9 / 21.25e9 + 5e-6)),
        (8, 8, 0, 14 * 2e-6 + 14 * 5e-6),
        # Inside 14 x 1/8 of 64 MB at 200 GB/s; between the nodes 14 x 1/64 of it at 21.25 GB/s.
        (8, 8, 64e6, 0.56e-3 + 14e6 / 21.25e9 + 98e-6),
    ],
)
def test_seconds_of_an_all_reduce(num_nodes, gpus_per_node, size, seconds) -> None:
    assert scaling.Cluster(num_nodes, gpus_per_node).all_reduce_seconds(size) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("seconds", "waiting"),
    [
        # Gradients of the three buckets are complete after 2.5, 5 and 10 s.
        ([1, 1, 4], 4),  # finished at 3.5, 6, 14
        ([3, 3, 0.5], 0.5),  # finished at 5.5, 8.5, 10.5
        ([6, 6, 4], 8.5),  # each waits for the one before: 8.5, 14.5, 18.5
    ],
)
def test_waiting_after_the_backward_pass(seconds: list[float], waiting: float) -> None:
    assert scaling.waiting_seconds(10, [25, 25, 50], seconds) == pytest.approx(waiting)


def test_an_update_by_hand() -> None:
    """1 GFLOP a token, 32 x 512 tokens at 40 % of 312 TFLOP/s; 75 MiB of gradients, a third of them embeddings."""
    work = scaling.Work(512, 1e9, 75 * MIB + 10, 25 * MIB)
    assert work.buckets() == [25 * MIB, 25 * MIB, 25 * MIB + 10]
    compute = 32 * 512 * 1e9 / 124.8e12
    cluster = scaling.Cluster(1, 8)
    for update_freq, sent in ((1, 25 * MIB), (4, 50 * MIB)):  # sums are in float32
        # 0.26 ms or twice that, far less than the 29 ms in which a bucket fills.
        each = 14 * (sent / 8 / 200e9 + 2e-6)
        update = scaling.plan_update(work, cluster, 32, update_freq)
        assert update.compute == pytest.approx(update_freq * compute)
        assert update.exchange == pytest.approx(3 * each, rel=1e-6)
        assert update.waiting == pytest.approx(each, rel=1e-6)
        assert update.slowed == pytest.approx(2 * each * 24 / 108, rel=1e-6)
        lost = each + 2 * each * 24 / 108 + 4 * 28e-6
        assert update.efficiency == pytest.approx(1 / (1 + lost / (update_freq * compute)), rel=1e-6)


def test_one_gpu_has_no_exchange() -> None:
    update = scaling.plan_update(scaling.Work(512, 1e9, 10**9, 10**8), scaling.Cluster(1, 1), 32, 1)
    assert (update.exchange, update.efficiency) == (0, 1)


def test_sizes_are_those_of_the_model() -> None:
    """mlm_base by the shapes of BERT: D = 768, F = 3,072, 12 layers, 512 positions, 32,768 rows, a head of D x D."""
    width, inner, rows = 768, 3072, 32_768
    layer = 4 * (width**2 + width) + 2 * width * inner + inner + width + 4 * width
    head = width**2 + width + 2 * width + rows
    work = scaling.work_of("mlm_base", rows)
    assert work.embedding_bytes == 2 * rows * width
    assert work.gradient_bytes == 2 * (rows * width + 512 * width + 2 * width + 12 * layer + head)
    assert work.tokens_per_sequence == 512


@pytest.mark.slow
def test_guide_has_the_printed_table(capsys) -> None:
    scaling.main(["--batch-size", "8", "32", "--update-freq", "1", "4"])
    printed = capsys.readouterr().out
    guide = (ROOT / "docs" / "several_nodes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(?:\||`amos).*", printed, flags=re.MULTILINE)
    assert len(rows) == 2 * (1 + 2 + 4)
    assert all(row in guide for row in rows)


def test_missing_recipe_is_one_line(capsys) -> None:
    line = error_line(capsys, scaling.main, "amos_huge")
    assert "error: there is no recipe amos_huge" in line
