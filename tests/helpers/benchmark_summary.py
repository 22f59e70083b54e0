"""Summaries of benchmarks, as ``amos glue`` and ``amos tag`` write them."""

import json
from pathlib import Path
from types import SimpleNamespace

from amos_fairseq.downstream.benchmark import save_results
from amos_fairseq.downstream.results import RunResult, summarize
from amos_fairseq.downstream.tagging.command import Tagging


def write_summary(folder: Path, updates: int, run: Path, from_scratch: bool = False, **scores: float) -> str:
    """Write what ``amos glue`` writes, reduced to what the report reads."""
    folder.mkdir(parents=True)
    tasks = {}
    for task, median in scores.items():
        own = {"accuracy": {"median": median, "deviation": 0.5, "count": 3}}
        if task == "MNLI":
            own["accuracy_mm"] = {"median": median + 1, "deviation": None, "count": 1}
        tasks[task] = {"main_score": "accuracy", "scores": own | {"f1": own["accuracy"]}}
    summary = {"benchmark": "glue", "setup": {"from_scratch": from_scratch}, "tasks": tasks, "notes": ["a note"]}
    summary |= {"runs": [], "checkpoint": {"file": str(run / "checkpoint_last.pt"), "num_updates": updates}}
    (folder / "glue.json").write_text(json.dumps(summary))
    (folder / "glue.setup.json").write_text("{}")
    (folder / "other.json").write_text("[]")
    return str(folder)


def write_tagging(folder: Path, updates: int, run: Path) -> str:
    """Write what ``amos tag`` writes after two seeds of upos and of chunk, with its own functions."""
    folder.mkdir(parents=True)
    scores = {
        "tagging-upos": [{"accuracy": 80.0}, {"accuracy": 82.0}],
        "tagging-chunk": [{"f1": f1, "precision": 1.0, "recall": 2.0, "accuracy": 99.0} for f1 in (60.0, 64.0)],
    }
    last = ("checkpoint_best.pt", 1.0, 1.0, None, {})
    results = [
        RunResult(task, "", seed, f"runs/{task}/seed{seed}", next(iter(own)), own, *last)
        for task, of_seeds in scores.items()
        for seed, own in enumerate(of_seeds, start=1)
    ]
    benchmark, summaries = object.__new__(Tagging), summarize(results)
    checkpoint = SimpleNamespace(file=run / "checkpoint_last.pt", num_updates=updates)
    benchmark.session, benchmark.opened = SimpleNamespace(out=folder, checkpoint=checkpoint, row_name="amos"), {}
    table = benchmark.table(summaries, list(benchmark.notes(results, summaries)))
    save_results(benchmark, {"from_scratch": False}, table, results, summaries)
    return str(folder)
