"""Summaries of benchmarks, as ``amos glue`` and ``amos tag`` write them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amos_fairseq.downstream.words.command import Tagging
from amos_fairseq.experiments.benchmark import save_results
from amos_fairseq.experiments.records import RunResult, summarize, write_record

LAST = ("checkpoint_best.pt", 1.0, 1.0, {}, [], {}, {}, [])  # fields of a result, from the checkpoint on


def write_summary(
    folder: Path,
    updates: int,
    run: Path,
    from_scratch: bool = False,
    benchmark: str = "glue",
    setup: Mapping[str, str] = {},
    baselines: Mapping[str, Any] = {},
    notes: Sequence[str] = ("a note",),
    **scores: float,
) -> str:
    """Write the results of three seeds with these medians of the accuracy."""
    results = []
    for task, median in scores.items():
        for seed, accuracy in enumerate((median - 0.5, median, median + 0.5), start=1):
            own = {"accuracy": accuracy, "f1": accuracy} | ({"accuracy_mm": accuracy + 1} if task == "MNLI" else {})
            results.append(RunResult(task, "", seed, f"runs/task/seed{seed}", "accuracy", own, *LAST))
    summary = {"benchmark": benchmark, "setup": {"from_scratch": from_scratch, **setup}, "notes": list(notes)}
    summary["baselines"] = dict(baselines)
    summary["tasks"] = {task: of_task.as_dict() for task, of_task in summarize(results).items()}
    summary |= {"runs": list(map(asdict, results)), "checkpoint": {"file": str(run / "checkpoint_last.pt")}}
    summary["checkpoint"]["num_updates"] = updates
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / f"{benchmark}.json", summary)
    (folder / f"{benchmark}.setup.json").write_text(json.dumps(summary["setup"]))
    (folder / "other.json").write_text("[]")
    return str(folder)


def write_tagging(folder: Path, updates: int, run: Path) -> str:
    """Write what ``amos tag`` writes after two seeds of upos and of chunk, with its own functions."""
    folder.mkdir(parents=True)
    scores = {
        "tagging-upos": [{"accuracy": 80.0}, {"accuracy": 82.0}],
        "tagging-chunk": [{"f1": f1, "precision": 1.0, "recall": 2.0, "accuracy": 99.0} for f1 in (60.0, 64.0)],
    }
    results = [
        RunResult(task, "", seed, f"runs/{task}/seed{seed}", next(iter(own)), own, *LAST)
        for task, of_seeds in scores.items()
        for seed, own in enumerate(of_seeds, start=1)
    ]
    benchmark, summaries = object.__new__(Tagging), summarize(results)
    checkpoint = SimpleNamespace(file=run / "checkpoint_last.pt", num_updates=updates)
    benchmark.session, benchmark.opened = SimpleNamespace(out=folder, checkpoint=checkpoint, row_name="amos"), {}
    table = benchmark.table(summaries, {}, list(benchmark.notes(results, summaries)))
    save_results(benchmark, {"from_scratch": False}, table, results, summaries, {})
    return str(folder)
