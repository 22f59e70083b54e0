"""Curves of training runs, read from their ``metrics.jsonl``."""

import dataclasses
import json
import math
import os
from typing import Any

from amos_fairseq.errors import UserError


@dataclasses.dataclass
class Curve:
    """One logged value over the updates of one split; nan where the run logged null."""

    updates: list[int] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Run:
    """The curves of one run: ``curves[split][key]``, split ``train`` or ``valid``."""

    name: str
    curves: dict[str, dict[str, Curve]]


def read_runs(paths: list[str]) -> list[Run]:
    """Read one run per path, named by the last part of the path that tells it from the others.

    Raises:
        UserError: a file is missing, holds no record, or is broken elsewhere than in its last line.
    """
    files = [os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path for path in paths]
    return [Run(name, read_curves(file)) for name, file in zip(run_names(files), files, strict=True)]


def run_names(files: list[str]) -> list[str]:
    """``out/a/metrics.jsonl`` and ``out/b/metrics.jsonl`` are ``a`` and ``b``; as many parents as make names differ."""
    parts = []
    for file in files:
        absolute = os.path.abspath(file)
        if os.path.basename(absolute) == "metrics.jsonl":
            absolute = os.path.dirname(absolute)
        parts.append(absolute.strip(os.sep).split(os.sep))
    names = [part[-1] for part in parts]
    for length in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(part[-length:]) for part in parts]
    return names


def read_curves(file: str) -> dict[str, dict[str, Curve]]:
    """All numeric values of one metrics file by split and key. A cut last line is left out and said so."""
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError as error:
        raise UserError(
            f"{file}: no metrics to plot ({error.strerror}); name a SAVE_DIR of fairseq-train with "
            "--user-dir amos_fairseq, or its metrics.jsonl"
        ) from error
    curves: dict[str, dict[str, Curve]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            add_record(curves, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise UserError(
                    f"{file}, line {number}: not a record of metrics ({line[:40]!r}); "
                    "remove the line, or name the metrics.jsonl that a training run wrote"
                ) from error
            print(f"{file}: the last line (line {number}) is cut short and left out; the run may be writing still")
    if not curves:
        raise UserError(f"{file}: no records yet; a run writes its first one after --log-interval updates")
    return curves


def add_record(curves: dict[str, dict[str, Curve]], record: dict[str, Any]) -> None:
    """Add one line of the file to the curves. ValueError, KeyError, TypeError or AttributeError on another shape."""
    update = int(record["update"])
    split = curves.setdefault("train" if record["split"] == "train" else "valid", {})
    for key, value in record.items():
        if key in ("split", "update"):
            continue
        curve = split.setdefault(key, Curve())
        curve.updates.append(update)
        curve.values.append(math.nan if value is None else float(value))
