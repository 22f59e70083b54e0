"""What the training curves of 5_train.sh say. Prints Markdown.

# write the curves RUNS/curve_mlm and RUNS/curve_amos to OUT, and compare them with those of a CPU
python training_curves.py save RUNS OUT DATA --settings "KEY=VALUE ..." --device cuda --beside CPU_FOLDER
# whether runs know more than token frequencies
python training_curves.py learned DATA RUN ...
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.run.metrics_file import read_records

OBJECTIVES = ("mlm", "amos")  # of the curves of a CPU
WINDOW = 10  # records of 5 updates each: the mean of 50 updates
# Nats, of a mean of 50 updates: three times the largest difference in 200 updates on a CPU (13 MB of text, 4,000 pieces).
# bf16 instead of float32 gave 0.010 (mlm) and 0.009 (amos), other samples of the generator (kernels=reference) 0.003; a
# learning rate that is a tenth lower gave 0.040 (mlm).
TOLERANCE = 0.03
# Nats below the entropy of the token frequencies, where a model stays that ignores its input.
LEAST_GAIN = 0.3
COUNTED_LINES = 20_000


def save(run: Path, data: Path, file: Path, settings: str) -> None:
    """Write a line that identifies the run, and a line with the losses of each record."""
    records = [losses_of(record) for record in read_records(run) if record["split"] == "train"]
    if not records:
        raise UserError(f"{run} has no records of training: CURVE_UPDATES must be at least 5")
    lines = [{"settings": settings, "data": identity(data)}, *records]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def losses_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the update and the losses of the objective's parts, in nats."""
    return {key: value for key, value in record.items() if key in ("update", "rtd_loss") or key.startswith("mlm_loss")}


def identity(data: Path) -> str:
    """Return a hash of the vocabulary and of the lengths of all lines."""
    digest = hashlib.sha256()
    for name in ("dict.txt", "train.idx"):
        digest.update((data / name).read_bytes())
    return digest.hexdigest()


def read_curve(file: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    if not file.is_file():
        raise UserError(f"{file} is missing: `5_train.sh DATA --curve --device cpu` writes it")
    head, *records = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return head, records


def compare(cpu_folder: Path, folder: Path, data: Path, device: str) -> None:
    """Compare the curves of ``device`` in ``folder`` with those of a CPU.

    Raises:
        UserError: the curves belong to other data or settings, or differ by more than the tolerance.
    """
    print(
        "| objective | loss | updates | largest difference of a mean of 50 updates | tolerance |\n|---|---|---:|---:|---:|"
    )
    summary, is_close = [], True
    for objective in OBJECTIVES:
        head, expected = read_curve(cpu_folder / f"cpu_curve_{objective}.jsonl")
        own_head, got = read_curve(folder / f"{device}_curve_{objective}.jsonl")
        if head != own_head or head["data"] != identity(data):
            raise UserError(f"{cpu_folder} has curves of other data or settings: write them again with --curve")
        differences = largest_differences(expected, got)
        for key, difference in differences.items():
            print(f"| {objective} | {key} | {expected[-1]['update']} | {difference:.4f} | {TOLERANCE} |")
        largest = max(differences.values())
        is_close = is_close and largest <= TOLERANCE
        summary.append(f"{objective} differs by {largest:.3f} of {TOLERANCE} nats")
    print(
        f"\nDecided: the first updates follow the curve of a CPU: {'yes' if is_close else 'NO'} ({', '.join(summary)})"
    )
    if not is_close:
        raise UserError("the curves differ from those of a CPU by more than bf16 explains")


def largest_differences(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest difference of the smoothed curves by loss; infinite where one has no finite value.

    Raises:
        UserError: the curves have other updates or losses.
    """
    if [record["update"] for record in one] != [record["update"] for record in other] or one[0].keys() != other[
        0
    ].keys():
        raise UserError("the curves have other updates or losses: write them again with --curve")
    found = {}
    for key in one[0].keys() - {"update"}:
        pairs = zip(smooth(one, key), smooth(other, key), strict=True)
        values = [abs(left - right) for left, right in pairs]
        found[key] = max(math.inf if math.isnan(value) else value for value in values)
    return dict(sorted(found.items()))


def smooth(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the means of :data:`WINDOW` consecutive records; nan where one is missing."""
    values = [math.nan if record[key] is None else record[key] for record in records]
    window = min(WINDOW, len(values))
    return [sum(values[start : start + window]) / window for start in range(len(values) - window + 1)]


def learned(data: Path, runs: Sequence[Path]) -> None:
    """Print first and last training losses, and whether the deepest MLM loss is below the entropy of the token frequencies."""
    entropy, answers = unigram_entropy(data), []
    print(f"Entropy of the token frequencies: {entropy:.2f} nats\n\n| run | loss | first | last |\n|---|---|---:|---:|")
    for run in runs:
        records = [losses_of(record) for record in read_records(run) if record["split"] == "train"]
        if not records:
            answers.append(f"{run.name} has no records")
            continue
        first, last = records[0], records[-1]
        for key in first.keys() - {"update"}:
            print(f"| {run.name}, {last['update']} updates | {key} | {cell(first[key])} | {cell(last[key])} |")
        depths = [int(key.removeprefix("mlm_loss_")) for key in last if key.startswith("mlm_loss_")]
        deepest = last[f"mlm_loss_{max(depths)}"]
        is_lower = deepest is not None and deepest < entropy - LEAST_GAIN
        answers.append(f"{run.name} {'yes' if is_lower else 'NO'}, {cell(deepest)}")
    print(f"\nDecided: learned more than token frequencies ({entropy:.2f} nats): {'; '.join(answers)}")


def cell(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def unigram_entropy(data: Path) -> float:
    """Return the entropy in nats of the tokens of the training text, without special ones, in up to 20,000 lines."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(data / "train"), dictionary)
    counts = np.zeros(len(dictionary), dtype=np.int64)
    for line in range(0, len(lines), -(-len(lines) // COUNTED_LINES)):
        counts += torch.bincount(lines[line], minlength=len(counts)).numpy()
    counts[: dictionary.nspecial] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@report_user_errors()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(dest="what", required=True)
    kind = kinds.add_parser("save")
    for name in ("runs", "out", "data"):
        kind.add_argument(name, type=Path)
    kind.add_argument("--settings", required=True, help="of the runs, all but those of the device")
    kind.add_argument("--device", choices=("cpu", "cuda"), required=True)
    kind.add_argument("--beside", type=Path, metavar="CPU_FOLDER", help="compare with the curves there")
    kind = kinds.add_parser("learned")
    kind.add_argument("data", type=Path)
    kind.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "learned":
        learned(arguments.data, arguments.runs)
        return 0
    for objective in OBJECTIVES:
        file = arguments.out / f"{arguments.device}_curve_{objective}.jsonl"
        save(arguments.runs / f"curve_{objective}", arguments.data, file, arguments.settings)
    if arguments.beside is not None:
        compare(arguments.beside, arguments.out, arguments.data, arguments.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
