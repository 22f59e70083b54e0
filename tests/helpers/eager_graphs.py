"""``python eager_graphs.py [arguments of fairseq-train]``: train with ``model.cuda_graphs`` on a CPU.

The captured function is called again in place of a graph: that is what a graph does, as far as the function's Python values are
those of the capture. At the end it prints how many updates were replayed.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

# ruff: noqa: E402
sys.path.insert(0, str(Path(__file__).parents[2]))
import amos_fairseq

amos_fairseq.register()
from amos_fairseq.run import graphs


class EagerGraph:
    """Takes the place of :class:`amos_fairseq.run.graphs.CudaGraph`."""

    replays = 0

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def replay(self) -> Any:
        type(self).replays += 1
        return self.work()


if __name__ == "__main__":
    with (
        mock.patch.object(graphs, "refusal", return_value=None),
        mock.patch.object(graphs.GraphedUpdates.__init__, "__defaults__", (EagerGraph,)),
    ):
        runpy.run_module("fairseq_cli.train", run_name="__main__", alter_sys=True)
    print(f"{EagerGraph.replays} updates replayed")
