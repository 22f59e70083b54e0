"""Results of ``amos probe``: ``OUT/results.json`` and the tables made of it.

results.json: {"format": 1, "checkpoint": {...}, "settings": {...}, "results": [one object for each Result]}
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.runs import read_json, write_json
from amos_fairseq.probing.scores import MICRO_F1, SEMEVAL_MACRO_F1
from amos_fairseq.strangers import finite_number, plain_name
from amos_fairseq.tables import Table

FORMAT = 1
RESULTS_FILE = "results.json"
METRIC_NAMES = {MICRO_F1: "micro-F1", SEMEVAL_MACRO_F1: "macro-F1 of SemEval"}
COLUMNS = 8  # of a table
BASELINE_NAMES = {"random": "random weights", "pieces": "pieces alone"}


@dataclass(frozen=True)
class Result:
    """One score of one probe.

    Attributes:
        layer: its number, ``mix`` for a mixture of all, ``pieces`` for token embeddings alone.
        baseline: None, ``random`` (weights) or ``pieces``.
        metric: ``micro_f1`` or ``semeval_macro_f1``.
        score: from 0 to 1.
        targets: number of targets that the score counts.

    Raises:
        TypeError: a value has another type.
        ValueError: the metric or the baseline is unknown, or the score is out of range.
    """

    task: str
    part: str
    layer: int | str
    baseline: str | None
    seed: int
    metric: str
    score: int | float
    targets: int

    def __post_init__(self) -> None:
        for name, kind in ((field.name, field.type) for field in fields(self)):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} {value!r}")
        if self.metric not in METRIC_NAMES or self.baseline not in (None, *BASELINE_NAMES):
            raise ValueError(f"metric {self.metric!r}, baseline {self.baseline!r}")
        finite_number(self.score, 0, 1)
        for name in (self.task, self.part, str(self.layer)):
            plain_name(name, 200)

    @property
    def column(self) -> tuple[str, int | str, str | None]:
        """What was probed: part, layer and baseline."""
        return self.part, self.layer, self.baseline


def read_results(folder: str | Path) -> dict[str, Any]:
    """Return the content of ``results.json`` in a folder that ``amos probe`` wrote.

    Returns:
        ``format`` 1, ``checkpoint``, ``settings`` and ``results``, a list of dictionaries with the fields of :class:`Result`.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    file = Path(folder) / RESULTS_FILE
    content = read_json(file)
    if content is None:
        raise UserError(f"{file} is missing: give the directory that amos probe wrote with --out")
    if content.get("format") != FORMAT:
        raise UserError(f"{file} is not of format {FORMAT} of amos probe: repeat the command with another --out")
    try:
        for result in content["results"]:
            Result(**result)
        settings, checkpoint = content["settings"], content["checkpoint"]
        if not isinstance(settings, dict) or not isinstance(checkpoint, dict):
            raise TypeError("settings and checkpoint must be objects")
        parts = [settings.get(name, {}) for name in ("data_sha256", "scored_on", "not_read")]
        if not all(isinstance(part, dict) for part in parts) or not isinstance(checkpoint["num_updates"], int):
            raise TypeError("data_sha256, scored_on, not_read or num_updates has a wrong type")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): repeat amos probe with another --out") from error
    return content


def write_results(out: Path, checkpoint: dict[str, Any], settings: dict[str, Any], results: list[Result]) -> None:
    """Write ``results.json`` atomically."""
    content = {"format": FORMAT, "checkpoint": checkpoint, "settings": settings}
    write_json(out / RESULTS_FILE, content | {"results": [asdict(result) for result in results]})


def column_name(column: tuple[str, int | str, str | None]) -> str:
    """Return the name of what was probed, such as "generator 4" or "discriminator 12, random weights"."""
    part, layer, baseline = column
    if baseline == "pieces":
        name = BASELINE_NAMES[baseline]
        return name if part in ("generator", "encoder", "discriminator") else f"{name} ({part})"
    return f"{part} {layer}" + (f", {BASELINE_NAMES[baseline]}" if baseline else "")


def row_name(task: str, metric: str) -> str:
    return task if metric == MICRO_F1 else f"{task} ({METRIC_NAMES[metric]})"


def scores_by_cell(results: list[Result]) -> dict[tuple[str, str], dict[tuple, list[float]]]:
    """Return the scores of all seeds by (task, metric), in the order of the results, and by column."""
    cells: dict[tuple[str, str], dict[tuple, list[float]]] = {}
    for result in results:
        cells.setdefault((result.task, result.metric), {}).setdefault(result.column, []).append(result.score)
    return cells


def columns_of(results: list[Result]) -> list[tuple]:
    """Return what was probed: pretrained layers, pieces alone, random weights; each in the order of parts and layers."""
    order = {None: 0, "pieces": 1, "random": 2}
    columns = dict.fromkeys(result.column for result in results)
    parts = list(dict.fromkeys(part for part, _, _ in columns))

    def key(column: tuple[str, int | str, str | None]) -> tuple[int, int, float]:
        part, layer, baseline = column
        return order[baseline], parts.index(part), layer if isinstance(layer, int) else float("inf")

    return sorted(columns, key=key)


def results_table(results: list[Result], title: str, notes: list[str]) -> Table:
    """Return 100 times the mean scores, ± the standard deviation over the seeds: tasks by layers as in AMOS "Figure 4".

    More than :data:`COLUMNS` layers are rows, so that the table fits on a page.
    """
    columns, cells = columns_of(results), scores_by_cell(results)
    rows = [[row_name(*task), *(_cell(own.get(column, [])) for column in columns)] for task, own in cells.items()]
    table = [["task", *map(column_name, columns)], *rows]
    if len(columns) > COLUMNS:
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "layer"
    return Table(title, table[0], table[1:], notes)


def table_notes(results: Sequence[Result], settings: dict[str, Any]) -> list[str]:
    """Return what a reader of the scores must know besides the settings of the probes."""
    notes = [str(note) for note in settings.get("not_read", {}).values()]
    if on_valid := [task for task, split in settings.get("scored_on", {}).items() if split == "valid"]:
        notes.append(
            f"{', '.join(on_valid)}: no test split; scored on the validation split, like the choice of weights"
        )
    if any(one.baseline == "random" for one in results):
        notes.append(
            f"random weights: the same architecture, newly initialized with seed {settings.get('random_weights_seed')}"
        )
    if any(one.baseline == "pieces" for one in results):
        notes.append("pieces alone: the trained token embeddings, without positions and layers")
    return notes


def _cell(scores: list[float]) -> str:
    if not scores:
        return "-"
    mean = f"{100 * statistics.mean(scores):.1f}"
    return f"{mean} ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else mean
