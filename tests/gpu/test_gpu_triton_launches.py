"""The launch constants of the Triton kernels on this GPU: the defaults and those of tuned_launches.json."""

from importlib.util import find_spec

import pytest
import torch
from benchmark.gpu import sweep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("start", sweep.WORKLOADS)
def test_tuned_launches_compute_what_the_defaults_compute(start: str) -> None:
    """At lengths that fill no tile; the defaults must fit into the shared memory of any GPU since Ampere."""
    from amos_fairseq.functional.cuda import launches

    for kernel in (name for name in launches.KERNELS if name.startswith(start)):
        width, _ = sweep.width_and_default(kernel, sweep.ODD, CUDA)
        with sweep.launched_with(kernel, launches.default_launch(kernel, width)):
            expected = [tensor.clone() for tensor in sweep.build(kernel, sweep.ODD, CUDA).result()]
        got = sweep.build(kernel, sweep.ODD, CUDA).result()
        assert sweep.difference(got, expected) <= sweep.TOLERANCE
