"""Say whether ``model.kernels=triton`` and ``model.compile`` should be the default on this GPU. Prints Markdown.

A whole step decides, where 3_baseline.sh has measured it. Otherwise attention does, which sweep.py has timed, and three layers
of amos_base, as written and compiled, which are timed here.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.composition import compose_recipe
from amos_fairseq.errors import report_user_errors
from amos_fairseq.measure.measurement import sustained_seconds
from amos_fairseq.models.configuration import transformer_config
from amos_fairseq.modules.encoder import TransformerEncoder

# A default changes for a gain that is more than the noise of a measurement.
LEAST_GAIN = 1.03
LAYERS, SEQUENCES, SECONDS = 3, 64, 1.0


def step_gains(baseline: Path) -> dict[str, float]:
    """Return how many times as fast a step is with a setting as without it, from the contests of amos_base.

    ``compile``: amos_N.json holds both rows. ``triton``: amos_N_triton.json beside amos_N.json, the faster row of each. Of
    several numbers of sequences N the smallest counts.
    """
    gains: dict[str, float] = {}
    for file in sorted(baseline.glob("amos_*.json"), key=lambda path: (len(path.name), path.name)):
        if file.stem.endswith("_triton"):
            continue
        with_fast, with_triton = own_rows(file), own_rows(file.with_name(f"{file.stem}_triton.json"))
        if with_fast and with_triton:
            gains.setdefault("triton", max(with_triton.values()) / max(with_fast.values()))
        if len(with_fast) == 2:
            gains.setdefault("compile", with_fast[True] / with_fast[False])
    return gains


def own_rows(file: Path) -> dict[bool, float]:
    """Return the median tokens/s of our rows in a contest: as written (False) and compiled (True), where measured."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["contestants"]
    return {"compiled" in row["name"]: row["tokens_per_second"]["median"] for row in rows if row["is_ours"]}


def layers_gain(device: torch.device) -> float:
    """Return how many times as fast layers of amos_base are under torch.compile: forward and backward pass in bf16."""
    sizes = transformer_config(compose_recipe("amos_base", []).model, num_layers=LAYERS)
    seconds = []
    for is_compiled in (False, True):
        encoder = TransformerEncoder(sizes).to(device, torch.bfloat16)
        encoder.is_compiled = is_compiled
        states = torch.randn(SEQUENCES, sizes.max_positions, sizes.width, device=device, dtype=torch.bfloat16)

        def both(encoder: TransformerEncoder = encoder, states: torch.Tensor = states) -> None:
            encoder.zero_grad()
            encoder(states)[-1].float().sum().backward()

        seconds.append(sustained_seconds(both, device, SECONDS))
    return seconds[0] / seconds[1]


def decisions(attention: dict[str, float] | None, of_step: dict[str, float], layers: float | None) -> Sequence[str]:
    """Return one line for each default.

    Args:
        attention: milliseconds by way, from sweep.json; None if the sweep has failed.
        of_step: of :func:`step_gains`.
        layers: of :func:`layers_gain`; None if it was not measured.
    """
    lines = []
    tuned = None if attention is None else attention["fast"] / attention["triton, tuned"]
    of_attention = "" if tuned is None else f"attention {tuned:.2f} times as fast as fast, tuned"
    if "triton" in of_step:
        text = ", ".join(filter(None, (f"a step {of_step['triton']:.2f} times as fast as with fast", of_attention)))
        lines.append(f"model.kernels=triton should be the default: {yes_no(of_step['triton'])} ({text})")
    elif tuned is not None:
        text = f"{of_attention}; 3_baseline.sh measures a step"
        lines.append(f"model.kernels=triton should be the default: {yes_no(tuned)} ({text})")
    else:
        lines.append("model.kernels=triton should be the default: not measured")
    gain, what = (of_step["compile"], "a step") if "compile" in of_step else (layers, f"{LAYERS} layers")
    measured = "not measured" if gain is None else f"{yes_no(gain)} ({what} {gain:.2f} times as fast as written)"
    return [*lines, f"model.compile=true should be the default: {measured}"]


def yes_no(gain: float) -> str:
    return "yes" if gain >= LEAST_GAIN else "no"


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder with sweep.json")
    parser.add_argument("--baseline", type=Path, required=True, help="folder with the JSON files of 3_baseline.sh")
    arguments = parser.parse_args()
    file, of_step = arguments.out / "sweep.json", step_gains(arguments.baseline)
    sweep: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    layers = None
    if "compile" not in of_step and arguments.device == "cuda":
        layers = layers_gain(torch.device(arguments.device))
    print(f"Whole steps: {of_step or 'not measured'}. A default changes for a gain of {LEAST_GAIN - 1:.0%} or more.\n")
    for line in decisions(sweep.get("attention"), of_step, layers):
        print(f"Decided: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
