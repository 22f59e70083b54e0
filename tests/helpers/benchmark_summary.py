"""A summary of a benchmark, as ``amos glue`` writes it."""

import json
from pathlib import Path


def write_summary(folder: Path, updates: int, run: Path, from_scratch: bool = False, **scores: float) -> str:
    """Write what ``amos glue`` writes, reduced to what the report reads."""
    folder.mkdir(parents=True)
    tasks = {}
    for task, median in scores.items():
        own = {"accuracy": {"median": median, "deviation": 0.5, "count": 3}}
        if task == "MNLI":
            own["accuracy_mm"] = {"median": median + 1, "deviation": None, "count": 1}
        tasks[task] = {"main_score": "accuracy", "scores": own | {"f1": own["accuracy"]}}
    summary = {
        "benchmark": "glue", "setup": {"from_scratch": from_scratch}, "tasks": tasks, "notes": ["a note"], "runs": [],
        "checkpoint": {"file": str(run / "checkpoint_last.pt"), "num_updates": updates},
    }  # fmt: skip
    (folder / "glue.json").write_text(json.dumps(summary))
    (folder / "glue.setup.json").write_text("{}")
    (folder / "other.json").write_text("[]")
    return str(folder)
