"""examples/benchmark/bench.py on a GPU: memory by PyTorch's count, every number format; skips where there is none."""

import pytest
import torch
from benchmark import bench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_benchmark_runs_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    monkeypatch.setattr(bench, "MATMUL_EDGES", {"cuda": (512,)})
    flags = ["--steps", "3", "--warmup", "2", "--device", "cuda", "--precision", precision, "--profile"]
    flags += ["--vocabulary-size", "2000", "--peer", "hf", "reference", "--set", "dataset.batch_size=8"]
    report = bench.run(["electra_tiny", *flags])
    assert [row["name"] for row in report["rows"]] == ["ours", "hf", "reference"]
    for row in report["rows"]:
        assert row["held_bytes"] < row["peak_bytes"] < torch.cuda.get_device_properties(0).total_memory
        # The states of one feed-forward network alone, at the width of the number format.
        bits = torch.finfo(bench.DTYPES[precision]).bits
        assert row["peak_bytes"] - row["held_bytes"] > 8 * 64 * 256 * bits // 8
    assert report["machine"]["device"] == torch.cuda.get_device_name()
