"""examples/benchmark/gpu/contests.py: what is compared on a GPU, where no test runs it."""

import pytest
from benchmark import bench
from benchmark.gpu import contests
from omegaconf import OmegaConf

from amos_fairseq.flops import read_configuration


@pytest.mark.parametrize("case", contests.CASES["cuda"])
def test_each_peer_differs_from_the_recipe(case: str) -> None:
    """A peer with the value of the recipe would be compared with itself."""
    arguments = bench.parse_arguments(case.split())
    cfg, _ = read_configuration(arguments.recipe, arguments.overrides)
    for peer in set(arguments.peers) - {"hf"}:
        key, value = peer.split("=")
        assert str(OmegaConf.select(cfg, key)).lower() != value
