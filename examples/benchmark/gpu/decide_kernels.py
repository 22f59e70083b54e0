"""Say whether ``model.kernels=triton`` and ``model.compile`` should be the default on this GPU, by whole steps of amos_base.

    python decide_kernels.py BASELINE/amos_64.json OUT/amos_64_triton.json

The files are contests of ``amos bench`` with ``kernels=fast`` and ``triton``, each with our step as written and compiled.
"""

import json
import sys
from pathlib import Path

# A default changes for a gain that is more than the noise of a measurement.
LEAST_GAIN = 1.03


def decisions(fast: dict[bool, float], triton: dict[bool, float]) -> list[str]:
    """Return one line for each default, from tokens/s as written (False) and compiled (True), where measured."""
    kernels, compiled, best = "not measured", "not measured", fast
    if fast and triton:
        gain = max(triton.values()) / max(fast.values())
        kernels = f"{yes_no(gain)} (a step {gain:.2f} times as fast as with fast)"
        best = triton if gain >= LEAST_GAIN else fast
    if len(best) == 2:
        name = "triton" if best is triton else "fast"
        gain = best[True] / best[False]
        compiled = f"{yes_no(gain)} (a step with kernels={name} {gain:.2f} times as fast as written)"
    return [
        f"model.kernels=triton should be the default: {kernels}",
        f"model.compile=true should be the default: {compiled}",
    ]


def yes_no(gain: float) -> str:
    return "yes" if gain >= LEAST_GAIN else "no"


def own_rows(file: Path) -> dict[bool, float]:
    """Return the median tokens/s of our rows in a contest; none if the file is missing."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["contestants"]
    return {"compiled" in row["name"]: row["tokens_per_second"]["median"] for row in rows if row["is_ours"]}


if __name__ == "__main__":
    missing = [name for name in sys.argv[1:] if not Path(name).exists()]
    print(f"Not there: {', '.join(missing) or 'none'}. A default changes for a gain of {LEAST_GAIN - 1:.0%} or more.\n")
    for line in decisions(*(own_rows(Path(name)) for name in sys.argv[1:3])):
        print(f"Decided: {line}")
