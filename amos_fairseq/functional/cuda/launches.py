"""Launch constants of the Triton kernels: tile sizes, warps and stages, by kernel, width and device."""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import triton

from amos_fairseq.functional.cuda.attention_kernels import IS_INTERPRETED

Launch = dict[str, int]
TUNED_FILE = Path(__file__).with_name("tuned_launches.json")
SIZE = 16 if IS_INTERPRETED else 64

DEFAULTS: dict[str, Launch] = {
    "attention_forward": {"BLOCK_M": SIZE, "BLOCK_N": SIZE, "num_warps": 4, "num_stages": 3},
    "attention_backward": {"BLOCK": SIZE, "num_warps": 8, "num_stages": 1},
    "summary": {"num_warps": 4},
    "block_summary": {"num_warps": 1},
    "pick": {"num_warps": 4},
    "gradient": {"TILE": 8, "ROWS": 256, "num_warps": 4},
}
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "attention_forward": {
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "attention_backward": {"BLOCK": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2)},
    "summary": {"num_warps": (1, 2, 4, 8)},
    "block_summary": {"num_warps": (1, 2, 4)},
    "pick": {"num_warps": (1, 2, 4, 8)},
    "gradient": {"TILE": (4, 8, 16), "ROWS": (128, 256, 512), "num_warps": (4, 8)},
}


@cache
def tuned() -> dict[str, dict[str, dict[str, Launch]]]:
    return json.loads(TUNED_FILE.read_text(encoding="utf-8"))


def launch_of(kernel: str, width: int, device: str) -> Launch:
    """Return the launch constants of ``kernel``: those tuned for the device of this name, or the defaults."""
    return dict(tuned().get(device, {}).get(kernel, {}).get(f"width {width}") or DEFAULTS[kernel])


def device_name(device: torch.device | None) -> str:
    """Return the name of a GPU; "" where there is none, as for tensors that only pretend to be on one."""
    is_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_gpu else ""


def candidates(kernel: str, width: int) -> Iterator[Launch]:
    """Yield the launches that a sweep tries, the default first."""
    default = DEFAULTS[kernel]
    yield dict(default)
    names = CHOICES[kernel]
    for values in itertools.product(*names.values()):
        launch = dict(zip(names, values, strict=True))
        if launch != default:
            yield launch


def padded_width(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
