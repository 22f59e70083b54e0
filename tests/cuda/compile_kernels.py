"""Compile kernels for GPUs that are not there: ``python compile_kernels.py`` prints JSON, bytes of shared memory by kernel.

A process of its own, because Triton compiles or interprets for as long as a process lives.
"""

import json

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from amos_fairseq.functional.cuda import attention, logits

POINTERS = {
    **dict.fromkeys(("heads", "grad", "grad_query", "grad_heads", "out", "logits"), "*bf16"),
    **dict.fromkeys(("bias", "lse", "delta", "query_sums", "distance_sums", "scores_out"), "*fp32"),
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


def compiled_shared_memory(
    kernel: JITFunction, launch: dict[str, int], flags: dict[str, object], architecture: int
) -> int:
    """Bytes of shared memory of a program; pointers and the lengths are multiples of 16, as they mostly are."""
    options = {name: value for name, value in launch.items() if name.startswith("num_")}
    constants = {**flags, **{name: value for name, value in launch.items() if name not in options}}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, OTHERS.get(name, "i32"))
        if (name in POINTERS and name != "bias") or name in ("T", "M", "V"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options).metadata.shared


def main() -> None:
    found = {}
    for width in (64, 128):
        flags = {"HAS_BIAS": True, "HAS_PADDING": True, "HAS_POSITIONS": False, "SIDE": attention.ALL}
        flags |= {"DROPS": True, "MASKS": True, "UPCAST": False, "H": 12, "D": width}
        for architecture in ARCHITECTURES:
            for kernel, launch in (
                (attention.forward_kernel, attention.forward_launch(width)),
                (attention.backward_kernel, attention.backward_launch(width)),
            ):
                name = f"{kernel.__name__} of heads of {width} on sm_{architecture}"
                found[name] = compiled_shared_memory(kernel, launch, flags, architecture)
    one_sided = {**flags, "HAS_BIAS": False, "HAS_PADDING": False, "SIDE": attention.PAST, "D": 64}
    some = {**flags, "HAS_POSITIONS": True, "MASKS": False, "HAS_PADDING": False, "D": 64}
    for name, case in (("of the past", one_sided), ("at positions", some)):
        for kernel, launch in (
            (attention.forward_kernel, attention.forward_launch(64)),
            (attention.backward_kernel, attention.backward_launch(64)),
        ):
            found[f"{kernel.__name__} {name} on sm_90"] = compiled_shared_memory(kernel, launch, case, 90)
    for kernel, launch in (
        (attention.window_kernel, {"BLOCK": 128}),
        (attention.delta_kernel, {"BLOCK_M": 64, "BLOCK_D": 64}),
    ):
        found[f"{kernel.__name__} on sm_90"] = compiled_shared_memory(kernel, launch, {}, 90)
    for architecture in ARCHITECTURES:
        for kernel, launch, flags in (
            (logits.summary_kernel, logits.summary_sizes(), {"K": 3, "SAMPLES": True}),
            (logits.block_summary_kernel, logits.sampling_sizes(1), {"K": 1, "X": 2}),
            (logits.pick_kernel, logits.sampling_sizes(128), {"K": 3, "X": 0}),
            (logits.gradient_kernel, logits.gradient_sizes(), {}),
        ):
            found[f"{kernel.__name__} on sm_{architecture}"] = compiled_shared_memory(
                kernel, launch, flags, architecture
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
