"""The machine code of the Triton kernels for an A100 and an H100, compiled without a GPU: what a program issues and needs.

Compiled with the installed Triton. AMOS_TRITONS names folders with other versions, separated by colons (``pip install
--no-deps --target FOLDER triton==3.6.0``): torch 2.7 has 3.3, torch 2.11 has 3.6.
"""

import json
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment, run_process

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")]

# Bytes of shared memory of a multiprocessor, of which a program gets 1 KiB more than it asks for, and of what one program can
# have; from the tables of compute capabilities in CUDA's programming guide.
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
# Products of all pairs of a tile, and in the kernel of the queries one of 64 pairs of a cell, 16 diagonals, 64 cells.
PRODUCTS = {"forward_kernel": 2, "query_kernel": 3, "key_kernel": 4}
SUMS_BY_CELL = 2 * 64 * 16 * 64
# Instructions of a thread for a tile of 64 x 64 pairs, with a bias and dropout; in the second table also with padding. Triton
# 3.6 gives (sm_80, sm_90): forward 580, 516; queries 672, 510; keys 811, 607; with padding 923, 721; 1,054, 748; 1,202, 841.
# Other versions differ: the bounds are a quarter above. The kernels before this test, one for the whole backward pass,
# had 990, 923 (forward) and 3,800, 3,142 (backward; of 4 warps).
MOST_INSTRUCTIONS = {
    "sm_80": {"forward_kernel": 725, "query_kernel": 840, "key_kernel": 1010},
    "sm_90": {"forward_kernel": 645, "query_kernel": 640, "key_kernel": 760},
}
MOST_MASKED_INSTRUCTIONS = {
    "sm_80": {"forward_kernel": 1150, "query_kernel": 1320, "key_kernel": 1500},
    "sm_90": {"forward_kernel": 900, "query_kernel": 935, "key_kernel": 1050},
}
# Three programs of 128 threads have 168 registers a thread on a multiprocessor; two have all 255, so nothing may be spilled.
MOST_REGISTERS = {"forward_kernel": 168, "query_kernel": 255, "key_kernel": 255}


def triton_version() -> tuple[int, int]:
    """(0, 0) where it is not installed."""
    if find_spec("triton") is None:
        return 0, 0
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def compile_kernels(*arguments: str, triton: str = "") -> tuple[int, str, str]:
    script = Path(__file__).with_name("compile_kernels.py")
    paths = ":".join(filter(None, (triton, str(ROOT))))
    result = run_process([sys.executable, script, *arguments], env=environment({"PYTHONPATH": paths}))
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(scope="module")
def programs() -> dict[str, dict]:
    status, output, errors = compile_kernels()
    assert status == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def check_products(name: str, program: dict) -> None:
    """Nothing is computed by two groups of warps: the machine code has the FLOPs of the arithmetic, padded to 64 or 128."""
    kernel = name.split()[0]
    is_wide = "heads of" in name
    expected = PRODUCTS[kernel] * 2 * 64 * 64 * (128 if is_wide else 64)
    if is_wide and kernel == "key_kernel":
        expected //= 2  # its tiles have 32 queries
    if kernel == "query_kernel" and not any(case in name for case in ("past", "positions", "without bias")):
        expected += SUMS_BY_CELL
    assert [loop["flops"] for loop in program["loops"]] == [expected], name


def test_no_product_is_issued_twice(programs) -> None:
    for name, program in programs.items():
        if name.split()[0] in PRODUCTS:
            check_products(name, program)


@pytest.mark.skipif(
    triton_version() == (3, 6),
    reason="Triton 3.6 lets products of query_kernel at repeated positions wait on sm_90 (C7515): slower, not wrong",
)
def test_no_product_waits_for_another_one_without_need(programs) -> None:
    """The assembler warns where Hopper's asynchronous products have to be serialized."""
    assert {name: program["warnings"] for name, program in programs.items() if program["warnings"]} == {}


@pytest.mark.skipif((0, 0) < triton_version() < (3, 6), reason="counted with Triton 3.6 and later")
@pytest.mark.parametrize(("case", "bounds"), [("", MOST_INSTRUCTIONS), (" masked", MOST_MASKED_INSTRUCTIONS)])
def test_a_tile_needs_few_instructions(programs, case: str, bounds: dict[str, dict[str, int]]) -> None:
    for architecture, kernels in bounds.items():
        for kernel, most in kernels.items():
            (loop,) = programs[f"{kernel}{case} on {architecture}"]["loops"]
            assert loop["instructions"] <= most, (kernel, architecture)


def test_two_programs_of_attention_fit_on_a_multiprocessor(programs) -> None:
    """By shared memory, and by registers without spilling, but for a few bytes where pairs are masked; three forward."""
    for name, program in programs.items():
        if (kernel := name.split()[0]) not in PRODUCTS:
            continue
        assert 2 * (program["shared"] + 1024) <= SHARED[name.split()[-1]], name
        is_plain = len(name.split()) == 3
        assert program["spilled"] <= (0 if is_plain else 64), name
        if is_plain:
            assert program["registers"] <= MOST_REGISTERS[kernel], name


def test_every_kernel_compiles_and_fits(programs) -> None:
    assert len(programs) == 2 * 2 * 3 + 5 * 3 + 2 + 4
    for name, program in programs.items():
        assert 0 <= program["shared"] <= MOST_SHARED[name.split()[-1]], name


@pytest.mark.skipif("AMOS_TRITONS" not in os.environ, reason="AMOS_TRITONS names no folder with another Triton")
def test_other_versions_of_triton() -> None:
    """3.3 and later issue no product twice; an older one is refused before it compiles, because it does not survive that."""
    for folder in os.environ["AMOS_TRITONS"].split(":"):
        installed = next(Path(folder).glob("triton-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        status, output, errors = compile_kernels("attention", triton=folder)
        if tuple(map(int, installed.split(".")[:2])) < (3, 3):
            assert status != 0
            assert f"it needs Triton 3.3 or newer, which torch 2.7 brings along, and found {installed}" in errors
            continue
        assert status == 0, (folder, errors[-3000:])
        for name, program in json.loads(output.splitlines()[-1]).items():
            check_products(name, program)
