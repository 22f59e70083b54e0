"""Summaries of benchmarks, as ``amos glue`` and ``amos tag`` write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from amos_fairseq.downstream.words.command import Tagging
from amos_fairseq.experiments.benchmark import Benchmark
from amos_fairseq.experiments.records import RunResult, in_order, read_result, summarize
from amos_fairseq.experiments.table import save_results
from amos_fairseq.output.terminal import Table


def read_results(out: Path) -> list[RunResult]:
    return in_order(read_result(file.parent) for file in out.glob("runs/*/*/seed*/result.json"))


def make_result(task: str, seed: int, main_score: str, scores: Mapping[str, float], trial: str = "") -> RunResult:
    """The result of an epoch; the identity is the name of the trial."""
    identity = trial or "00000000"
    return RunResult(
        task=task,
        trial=trial,
        seed=seed,
        identity=identity,
        directory=f"runs/{task}/{identity}/seed{seed}",
        main_score=main_score,
        scores=dict(scores),
        checkpoint="checkpoint_best.pt",
        epoch=1.0,
        seconds=1.0,
        settings={"hyperparameters": {"lr": 0.1}},
        keeps_checkpoints=False,
        versions={},
        notes=[],
    )


def made_by(kind: type[Benchmark], name: str, folder: Path, updates: int, run: Path, from_scratch: bool) -> Benchmark:
    """A benchmark that has only what its table and its files need."""
    folder.mkdir(parents=True, exist_ok=True)
    benchmark = object.__new__(kind)
    benchmark.name = name
    checkpoint = SimpleNamespace(file=run / "checkpoint_last.pt", sha256="c" * 64, arch="amos", num_updates=updates)
    checkpoint.from_scratch = from_scratch
    benchmark.session = SimpleNamespace(out=folder, checkpoint=checkpoint, row_name="amos")
    return benchmark


class AnyBenchmark(Benchmark):
    train_flags = evaluate = None


def write_summary(
    folder: Path,
    updates: int,
    run: Path,
    from_scratch: bool = False,
    benchmark: str = "glue",
    notes: Sequence[str] = ("a note",),
    **scores: float,
) -> str:
    """Write the results of three seeds with these medians of the accuracy."""
    results = []
    for task, median in scores.items():
        for seed, accuracy in enumerate((median - 0.5, median, median + 0.5), start=1):
            own = {"accuracy": accuracy, "f1": accuracy} | ({"accuracy_mm": accuracy + 1} if task == "MNLI" else {})
            results.append(make_result(task, seed, "accuracy", own))
    written = made_by(AnyBenchmark, benchmark, folder, updates, run, from_scratch)
    save_results(written, Table("", [""], [], list(notes)), results, summarize(results))
    (folder / "other.json").write_text("[]")
    return str(folder)


def write_tagging(folder: Path, updates: int, run: Path) -> str:
    """Write what ``amos tag`` writes after two seeds of upos and of chunk, with its own functions."""
    scores = {
        "tagging-upos": [{"accuracy": 80.0}, {"accuracy": 82.0}],
        "tagging-chunk": [{"f1": f1, "precision": 1.0, "recall": 2.0, "accuracy": 99.0} for f1 in (60.0, 64.0)],
    }
    results = [
        make_result(task, seed, next(iter(own)), own)
        for task, of_seeds in scores.items()
        for seed, own in enumerate(of_seeds, start=1)
    ]
    benchmark, summaries = made_by(Tagging, "tagging", folder, updates, run, from_scratch=False), summarize(results)
    benchmark.opened = {}
    table = benchmark.table(summaries, {}, list(benchmark.notes(results, summaries)))
    save_results(benchmark, table, results, summaries)
    return str(folder)
