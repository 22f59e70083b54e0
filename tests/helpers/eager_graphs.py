"""``python eager_graphs.py [arguments of fairseq-train]``: train with ``model.cuda_graphs`` on a CPU.

A function takes the place of a graph. At the end it prints how many updates were replayed.
"""

import runpy
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "benchmark")]
# ruff: noqa: E402
from training_step import EagerGraph

from amos_fairseq.run import graphs

if __name__ == "__main__":
    with (
        mock.patch.object(graphs, "refusal", return_value=None),
        mock.patch.object(graphs.GraphedUpdates.__init__, "__defaults__", (EagerGraph,)),
    ):
        runpy.run_module("fairseq_cli.train", run_name="__main__", alter_sys=True)
    print(f"{EagerGraph.replays} updates replayed")
