"""Functions of test files that run on two connected CPU ranks, each in a forked process."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from forked_command import rank_variables, run_ranks

HELPERS = Path(__file__).parent
NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


def succeed_on_two_ranks(function: Callable[..., None], *arguments: object) -> None:
    """Call ``function(rank, *arguments)`` of a test file on two gloo ranks; the arguments are passed as strings."""
    names = [inspect.getfile(function), function.__name__, *map(str, arguments)]
    for done in run_ranks("rank_functions", names, rank_variables(2), HELPERS):
        assert done.returncode == 0, done.stdout + done.stderr


def main(file: str, name: str, *arguments: str) -> None:
    sys.path.insert(0, str(HELPERS.parents[1]))
    torch.distributed.init_process_group("gloo")
    # The launch is over; the settings of a test decide what fairseq does.
    for variable in NAMES:
        del os.environ[variable]
    spec = importlib.util.spec_from_file_location("functions_of_ranks", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(torch.distributed.get_rank(), *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
