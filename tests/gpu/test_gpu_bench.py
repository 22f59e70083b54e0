"""``amos bench`` on a GPU: memory by PyTorch's count, shares by kernels, every number format; skips where there is none."""

import pytest
import torch

from amos_fairseq.measure import measurement
from amos_fairseq.measure.configuration import BenchSettings
from amos_fairseq.measure.contest import run_bench
from amos_fairseq.measure.step_profile import ATTENTION, FFN, OPTIMIZER, OUTPUT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_benchmark_runs_on_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    monkeypatch.setattr(measurement, "MATMUL_EDGES", {"cuda": (512,)})
    monkeypatch.setattr(measurement, "COPIED_BYTES", {"cuda": 2**24})
    measured = {
        "peers": ["hf", "reference"],
        "steps": 3,
        "warmup": 2,
        "device": "cuda",
        "pieces": True,
        "vocabulary_size": 2_000,
    }
    settings = BenchSettings("electra_tiny", ["dataset.batch_size=8"], precision=precision, **measured)
    report = run_bench(settings)
    assert [row.name for row in report.rows] == ["ours", "hf", "reference"]
    for row in report.rows:
        assert row.held_bytes < row.peak_bytes < torch.cuda.get_device_properties(0).total_memory
        # The states of one feed-forward network alone, at the width of the number format.
        assert row.peak_bytes - row.held_bytes > 8 * 64 * 256 * torch.finfo(report.setup.dtype).bits // 8
    assert sum(report.parts.values()) == pytest.approx(1)
    assert min(report.parts[part] for part in (ATTENTION, FFN, OUTPUT, OPTIMIZER)) > 0.01
    assert report.as_json()["machine"]["gpu"]["name"]
    assert all(min(piece.seconds.values()) > 0 for piece in report.pieces)
