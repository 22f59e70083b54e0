"""Compile kernels for GPUs that are not there: ``python compile_kernels.py`` prints JSON, bytes of shared memory by kernel.

A process of its own, because Triton compiles or interprets for as long as a process lives.
"""

import json

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from amos_fairseq.functional.cuda import attention

POINTERS = {
    **dict.fromkeys(("heads", "grad", "grad_query", "grad_heads", "out"), "*bf16"),
    **dict.fromkeys(("bias", "lse", "delta", "query_sums", "distance_sums", "scores_out"), "*fp32"),
    **dict.fromkeys(("seed", "positions"), "*i64"),
    "padding": "*i1",
}
OTHERS = {"scale": "fp32", "keep_scale": "fp32", "drop_below": "i64"}
ARCHITECTURES = (80, 90)  # A100; H100 and H200


def compiled_shared_memory(
    kernel: JITFunction, launch: dict[str, int], flags: dict[str, object], architecture: int
) -> int:
    """Bytes of shared memory of a program; pointers and the lengths are multiples of 16, as they mostly are."""
    options = {name: value for name, value in launch.items() if name.startswith("num_")}
    constants = {**flags, **{name: value for name, value in launch.items() if name not in options}}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, OTHERS.get(name, "i32"))
        if (name in POINTERS and name != "bias") or name in ("T", "M"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options).metadata.shared


def main() -> None:
    found = {}
    for width in (64, 128):
        flags = {
            "HAS_BIAS": True, "HAS_PADDING": True, "HAS_POSITIONS": False, "SIDE": attention.ALL, "DROPS": True, "MASKS": True,
            "UPCAST": False, "H": 12, "D": width,
        }  # fmt: skip
        for architecture in ARCHITECTURES:
            for kernel, launch in (
                (attention.forward_kernel, attention.forward_launch(width)),
                (attention.backward_kernel, attention.backward_launch(width)),
            ):
                name = f"{kernel.__name__} of heads of {width} on sm_{architecture}"
                found[name] = compiled_shared_memory(kernel, launch, flags, architecture)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
