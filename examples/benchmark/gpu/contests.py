"""Contests of bench.py in one process, the most important first; a line of JSON for each as soon as it is there.

python contests.py OUT.jsonl [cuda|cpu] [SECONDS]

A contest begins only while 30 of the SECONDS (default: 150) are left.
"""

import json
import sys
import time

import bench
import torch
from gpu_workload import first_line

SHORT = "--steps 8 --warmup 4 --precision bf16 --device cuda"
BASE = "--vocabulary-size 32768"
GRAPH = "model.cuda_graphs=true"
GRAPHS = (
    f"{GRAPH} {GRAPH},model.kernels=triton {GRAPH},model.compile=true {GRAPH},model.kernels=triton,model.compile=true"
)
CASES = {
    "cuda": (
        f"amos_base --set dataset.batch_size=64 {BASE} --peer model.kernels=fast",
        f"electra_base --set dataset.batch_size=64 {BASE} --peer hf model.kernels=triton",
        f"electra_modern_base --set dataset.batch_size=64 {BASE} --peer hf",
        f"electra_small --set dataset.batch_size=128 {BASE} --peer hf {GRAPHS}",
        f"electra_small --set dataset.batch_size=256 {BASE} --peer {GRAPHS}",
        f"electra_modern_mini --set dataset.batch_size=256 {BASE} --peer {GRAPHS}",
        f"amos_small --set dataset.batch_size=128 {BASE} --peer {GRAPHS}",
        f"amos_base --set dataset.batch_size=64 {BASE} --peer model.compile=true",
    ),
    "cpu": (
        "amos_tiny --set dataset.batch_size=2 --vocabulary-size 500",
        "electra_tiny --set dataset.batch_size=2 --vocabulary-size 500 --peer hf",
    ),
}


LONGEST_CONTEST = 30  # seconds


def main(out: str, device: str = "cuda", seconds: str = "150") -> None:
    until = time.time() + float(seconds)
    flags = SHORT
    if device == "cpu":
        flags = "--steps 1 --warmup 1 --precision float32 --device cpu"
    bench.MATMUL_EDGES = {"cuda": (8192,), "cpu": (64,)}
    bench.PEAK_SECONDS = {"cuda": 0.4, "cpu": 0.05}
    for case in CASES[device]:
        start = time.time()
        if until - start < LONGEST_CONTEST:
            print(f"\n{case}: no time left")
            continue
        try:
            report = bench.run([*case.split(), *flags.split()])
        except Exception as error:  # the others still run
            report = {"case": case, "failed": first_line(error)}
            print(f"\n{case} FAILED: {first_line(error)}")
        report["total_seconds"] = round(time.time() - start)
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
