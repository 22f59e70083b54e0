"""Compile kernels for GPUs that are not there: ``python compile_kernels.py`` prints what the machine code needs.

One line of JSON: by kernel its shared memory and spilled bytes, registers, and of each loop with matrix products its
instructions and the FLOPs of the products. A process of its own, because Triton compiles or interprets for as long as a process
lives; cuobjdump comes with Triton.
"""

import inspect
import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from amos_fairseq.functional.cuda import attention, logits
from amos_fairseq.functional.cuda.launches import default_launch

POINTERS = {
    **dict.fromkeys(("heads", "grad", "grad_query", "grad_heads", "out", "logits"), "*bf16"),
    **dict.fromkeys(("bias", "lse", "delta", "cell_sums", "scores_out"), "*fp32"),
    **dict.fromkeys(
        ("mixture_weights", "part_max", "part_sum", "scores", "block_max", "block_sum", "largest", "total"), "*fp32"
    ),
    **dict.fromkeys(("picked_logits", "log_sum", "grad_nll", "sums"), "*fp32"),
    **dict.fromkeys(("seed", "positions", "excluded", "blocks", "picked", "targets"), "*i64"),
    **dict.fromkeys(("padding", "never_sampled_mask"), "*i1"),
    "points": "*fp64",
}
OTHERS = {"scale": "fp32", "keep_scale": "fp32", "drop_below": "i64"}
ARCHITECTURES = (80, 90)  # A100; H100 and H200
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
# A warp computes HMMA.16816, a group of four warps HGMMA.64xNxK.
SIZES_OF_PRODUCT = {"HMMA": r"HMMA\.(16)(8)(16|8)\b", "HGMMA": r"HGMMA\.(\d+)x(\d+)x(\d+)\b"}
WARPS_OF_PRODUCT = {"HMMA": 1, "HGMMA": 4}


def compiled(kernel: JITFunction, launch: dict[str, int], flags: dict[str, object], architecture: int) -> dict:
    """What a program needs, specialized as in training: pointers and lengths are multiples of 16, except the bias of a head."""
    options = {name: value for name, value in launch.items() if name.startswith(("num_", "enable_"))}
    constants = {**flags, **{name: value for name, value in launch.items() if name not in options}}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, aligned = {}, []
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, OTHERS.get(name, "i32"))
        if (name in POINTERS and name != "bias") or name in ("T", "M", "V"):
            aligned.append(place)
    assert "constexprs" in inspect.signature(ASTSource).parameters, "the interface of Triton 3.3 and later"
    attrs = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    program = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([BINARIES / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    used = {"shared": program.metadata.shared, "registers": registers, "spilled": stack}
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.M)
    loops = loops_with_products([(int(at, 16), text) for at, text in instructions], options.get("num_warps", 4))
    return used | {"loops": loops}


def loops_with_products(instructions: list[tuple[int, str]], warps: int) -> list[dict[str, int]]:
    """Instructions of a thread and FLOPs of all warps, in one pass through each loop that has matrix products."""
    loops = []
    for end, text in instructions:
        branch = re.match(r"(?:@!?U?P\w+ +)?BRA(?:\.\w+)* +(?:!?U?P\w+, +)?`?\(?(0x[0-9a-f]+)", text)
        if branch is None or int(branch.group(1), 16) > end:
            continue
        body = [each for address, each in instructions if int(branch.group(1), 16) <= address <= end]
        flops = sum(flops_of(each, warps) for each in body)
        if flops:
            loops.append({"instructions": len(body), "flops": flops})
    return loops


def flops_of(instruction: str, warps: int) -> int:
    for name, pattern in SIZES_OF_PRODUCT.items():
        if match := re.search(r"(?<!\w)" + pattern, instruction):
            m, n, k = map(int, match.groups())
            return 2 * m * n * k * warps // WARPS_OF_PRODUCT[name]
    assert "MMA" not in instruction.split(".")[0], f"a product of unknown size: {instruction}"
    return 0


def attention_kernels(flags: dict[str, object]) -> list[tuple[JITFunction, dict[str, int], dict[str, object]]]:
    kernels = (attention.forward_kernel, attention.query_kernel, attention.key_kernel)
    names = ("attention_forward", "attention_backward_query", "attention_backward_key")
    return [(k, default_launch(name, flags["D"]), flags) for k, name in zip(kernels, names, strict=True)]


def main() -> None:
    flags = {"HAS_BIAS": True, "HAS_PADDING": False, "HAS_POSITIONS": False, "SIDE": attention.ALL}
    flags |= {"DROPS": True, "MASKS": False, "CHECKS_ROWS": False, "UPCAST": False, "H": 12, "D": 64}
    masked = flags | {"HAS_PADDING": True, "MASKS": True, "CHECKS_ROWS": True}
    cases = {"": attention_kernels(flags), " masked": attention_kernels(masked)}
    cases[" of heads of 128"] = attention_kernels(flags | {"D": 128})
    cases[" of heads of 80"] = attention_kernels(masked | {"D": 80})
    cases[" of the past"] = attention_kernels(masked | {"HAS_BIAS": False, "SIDE": attention.PAST})
    cases[" at positions"] = attention_kernels(flags | {"HAS_POSITIONS": True, "CHECKS_ROWS": True})
    cases[" without bias and dropout"] = attention_kernels(flags | {"HAS_BIAS": False, "DROPS": False})
    cases[" of sums"] = [
        (attention.distance_kernel, {"BLOCK": 64, "DISTANCES": 128}, {}),
        (attention.window_kernel, {"BLOCK": 128}, {}),
    ]
    rows = {"ROWS": logits.BLOCK_ROWS}
    one, sixteen = ({"SAMPLES_PER_PROGRAM": samples, **default_launch("pick", samples)} for samples in (1, 16))
    cases[" of the output layer"] = [
        (logits.summary_kernel, default_launch("summary", 0), {"K": 3, "SAMPLES": True, "BLOCKS": 32, **rows}),
        (logits.block_summary_kernel, one, {"K": 1, "X": 2, **rows}),
        (logits.pick_kernel, sixteen, {"K": 3, "X": 0, **rows}),
        (logits.gradient_kernel, default_launch("gradient", 0), {"POSITIONS": logits.GRADIENT_POSITIONS}),
    ]
    print(
        json.dumps(
            {
                f"{kernel.__name__}{case} on sm_{architecture}": compiled(kernel, launch, of_case, architecture)
                for architecture in ARCHITECTURES
                for case, kernels in cases.items()
                if architecture == 90 or case in ("", " masked")  # the others take a second each to compile
                for kernel, launch, of_case in kernels
            }
        )
    )


if __name__ == "__main__":
    main()
