"""The machine code of the Triton kernels for an A100 and an H100, compiled without a GPU: what a program issues and needs.

Compiled with the installed Triton. AMOS_TRITONS names folders with other versions, separated by colons (``pip install
--no-deps --target FOLDER triton==3.6.0``): torch 2.7 has 3.3, torch 2.11 has 3.6.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_runs import ROOT, environment, run_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

# Bytes of shared memory of a multiprocessor, of which a program gets 1 KiB more than it asks for, and of what one program can
# have; from the tables of compute capabilities in CUDA's programming guide.
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
REGISTERS = 65_536  # of a multiprocessor of either
THREADS = 128  # four warps

# Products of 64 x 64 x 64 in a tile, besides one of a matrix of zeros and ones.
PRODUCTS = {"forward_kernel": 2, "query_kernel": 3, "key_kernel": 4}
# Instructions of a thread for a tile of 64 x 64 pairs, with a bias and dropout. The installed Triton may need a tenth more than
# 3.6, which gave (sm_80, sm_90): forward 580, 516; queries 663, 529; keys 811, 607. The kernels
# before this test, one for the whole backward pass, had 990, 923 (forward) and 3,800, 3,142 (backward; per four warps).
MOST_INSTRUCTIONS = {
    "sm_80": {"forward_kernel": 640, "query_kernel": 690, "key_kernel": 840},
    "sm_90": {"forward_kernel": 570, "query_kernel": 660, "key_kernel": 680},
}


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
    """Nothing is computed by two groups of warps: the machine code has the FLOPs of the arithmetic."""
    kernel, architecture = name.split()[0], name.split()[-1]
    # Sums by cells: 16 diagonals of 64 cells of 64 pairs.
    expected = PRODUCTS[kernel] * 2 * 64**3 + (kernel == "query_kernel") * 2 * 16 * 64 * 64
    assert [loop["flops"] for loop in program["loops"]] == [expected], (name, architecture)


def test_no_product_is_issued_twice(programs) -> None:
    for name, program in programs.items():
        if len(name.split()) == 3 and name.split()[0] in PRODUCTS:
            check_products(name, program)


def test_a_tile_needs_few_instructions(programs) -> None:
    for architecture, kernels in MOST_INSTRUCTIONS.items():
        for kernel, most in kernels.items():
            (loop,) = programs[f"{kernel} on {architecture}"]["loops"]
            assert loop["instructions"] <= most, (kernel, architecture)


def test_two_programs_of_attention_fit_on_a_multiprocessor(programs) -> None:
    """By registers and by shared memory; nothing is spilled where nothing is masked, and little elsewhere."""
    for name, program in programs.items():
        if not name.startswith(tuple(PRODUCTS)):
            continue
        assert 2 * (program["shared"] + 1024) <= SHARED[name.split()[-1]], name
        assert 2 * THREADS * program["registers"] <= REGISTERS, name
        is_plain = len(name.split()) == 3
        assert program["spilled"] <= (0 if is_plain else 64), name


def test_every_kernel_compiles_and_fits(programs) -> None:
    assert len(programs) == 2 * 2 * 3 + 5 * 3 + 2 + 4
    for name, program in programs.items():
        assert 0 <= program["shared"] <= MOST_SHARED[name.split()[-1]], name


@pytest.mark.skipif("AMOS_TRITONS" not in os.environ, reason="AMOS_TRITONS names no folder with another Triton")
def test_other_versions_of_triton() -> None:
    """3.3 and later issue no product twice; an older one is refused before it compiles, because it does not survive that."""
    for folder in os.environ["AMOS_TRITONS"].split(":"):
        version = next(Path(folder).glob("triton-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        status, output, errors = compile_kernels("attention", triton=folder)
        if tuple(map(int, version.split(".")[:2])) < (3, 3):
            assert status != 0
            assert f"model.kernels=triton needs Triton 3.3 or newer, and found {version}" in errors
            continue
        assert status == 0, (folder, errors[-3000:])
        for name, program in json.loads(output.splitlines()[-1]).items():
            check_products(name, program)
