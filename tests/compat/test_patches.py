"""The table of patches against fairseq's attributes after the plugin is imported."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq import checkpoint_utils, options
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer

from amos_fairseq.compat import PATCHES
from amos_fairseq.compat.patching import Patch, Script

ALL = [patch for patches in PATCHES.values() for patch in patches]


def modules_of(function: Any) -> Iterator[str]:
    """The last parts of the names of this package's modules that wrap a function, from the outside."""
    while hasattr(function, "patch"):
        yield function.patch.replacement.__module__.rpartition(".")[2]
        function = function.__wrapped__


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (Trainer, "__init__", ["compilation", "distribution", "patching", "signals"]),
        (Trainer, "train_step", ["run_lifecycle", "failing_updates", "collapse", "divergence", "failing_updates"]),
        (Trainer, "clip_grad_norm", ["host_reads", "failing_updates"]),
        (Trainer, "_check_grad_norms", ["host_reads", "distribution"]),
        (Trainer, "state_dict", ["collapse", "divergence", "run_lifecycle"]),
        # SAVE_DIR is locked before it is repaired.
        (
            checkpoint_utils,
            "load_checkpoint",
            ["collapse", "divergence", "run_lifecycle", "checkpoints", "metrics_log", "run_lifecycle"],
        ),
        (checkpoint_utils, "save_checkpoint", ["signals", "divergence"]),
        (distributed_utils, "call_main", ["distribution", "signals"]),
        (options, "parse_args_and_arch", ["precision", "known_names"]),
        (progress_bar, "progress_bar", ["metrics_log", "progress"]),
    ],
)
def test_order_of_several_patches(owner: Any, name: str, expected: list[str]) -> None:
    found = list(modules_of(getattr(owner, name)))
    assert found == expected
    in_table = [patch.replacement for patch in ALL if patch[:2] == (owner, name)]
    assert [make.__module__.rpartition(".")[2] for make in reversed(in_table)] == expected


def test_every_attribute_of_the_table_is_replaced() -> None:
    for patch in ALL:
        if not isinstance(patch.owner, Script):  # replaced where it runs
            attribute = getattr(patch.owner, patch.name)
            assert getattr(attribute, "fget", attribute).patch in ALL


def test_a_missing_attribute_is_an_error() -> None:
    """Another version of fairseq may have renamed it."""
    with pytest.raises(AttributeError, match="renamed"):
        Patch(SimpleNamespace(), "renamed", lambda stock: None).apply_to(SimpleNamespace())


def test_static_methods_remain_static() -> None:
    class Owner:
        @staticmethod
        def double(value: int) -> int:
            return 2 * value

    Patch(Owner, "double", lambda stock, value: stock(value) + 1).apply_to(Owner)
    assert Owner.double(3) == Owner().double(3) == 7
    assert Owner.double.__wrapped__(3) == 6
