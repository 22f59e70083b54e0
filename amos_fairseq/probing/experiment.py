"""One call of ``amos probe``: which probes to train, their features, and the results in OUT.

OUT/results.json                                  the results so far, written after every probe
OUT/results.csv, table.md, probing.png, .svg      made of them at the end
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.experiments.records import content_sha256
from amos_fairseq.files import csv_text, distinct_names, file_sha256, first_difference, locked, write_text
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import say
from amos_fairseq.probing.features import (
    MIXTURE,
    PIECES,
    RANDOM_SEED,
    EncodedSplit,
    Layer,
    ProbedPart,
    choose_parts,
    encode_split,
    parts_of,
    random_weights,
    stored_features,
)
from amos_fairseq.probing.probe import (
    THRESHOLD,
    ProbeData,
    ProbeSettings,
    SplitTargets,
    majority_scores,
    split_targets,
    train_probe,
)
from amos_fairseq.probing.results import (
    MAJORITY,
    RESULTS_FILE,
    ProbeResult,
    ProbeResults,
    in_order,
    layer_name,
    plot_probing,
    read_probe_results,
    results_table,
    row_name,
    table_notes,
)
from amos_fairseq.probing.tasks import ProbingTask

LOCK_FILE = ".amos_probe.lock"


class ProbedLayers(NamedTuple):
    """Layers of one network; ``baseline`` says which baseline they are, None for trained layers."""

    part: ProbedPart
    layers: list[Layer]
    baseline: str | None


class TextGroup(NamedTuple):
    """Tasks with the same texts, these texts as pieces, and the targets by task and split."""

    tasks: list[ProbingTask]
    encoded: dict[str, EncodedSplit]
    targets: dict[str, dict[str, SplitTargets]]


def run_probes(
    loaded: LoadedCheckpoint,
    tasks: Sequence[ProbingTask],
    out: Path,
    settings: ProbeSettings,
    *,
    parts: Sequence[str] | None = None,
    layers: str | None = None,
    with_baselines: bool = False,
    num_seeds: int = 1,
    device: str = "cpu",
) -> Table:
    """Train every probe that has no result in ``out`` yet, write all files there, and return the table."""
    chosen = choose_layers(loaded, parts, layers, with_baselines, device)
    groups = group_by_texts(loaded, tasks)
    checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
    checkpoint |= {"model": type(loaded.model).__name__, "num_updates": loaded.num_updates}
    fixed = {"features": "whitened", "threshold": THRESHOLD, "random_weights_seed": RANDOM_SEED}
    with explain_os_errors(f"{out} cannot be written", ": give another --out"):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK_FILE, f"another amos probe is writing to {out}", "wait until it has ended"):
        results = open_results(out, checkpoint, asdict(settings) | fixed, tasks)
        done = {(one.task, *one.column, one.seed) for one in results.results}
        for group, probed in itertools.product(groups, chosen):
            pending = [
                (task, layer, seed)
                for task, layer, seed in itertools.product(group.tasks, probed.layers, range(1, num_seeds + 1))
                if (task.name, probed.part.name, layer, probed.baseline, seed) not in done
            ]
            if pending:
                train_probes(loaded, group, probed, pending, settings, device, results, out)
        return write_tables(out, results)


def choose_layers(
    loaded: LoadedCheckpoint, names: Sequence[str] | None, layers: str | None, with_baselines: bool, device: str
) -> list[ProbedLayers]:
    parts = parts_of(loaded.model)
    names = choose_parts(loaded, parts, names)
    layers_of = {name: parse_layers(layers, parts[name]) for name in names}
    probed = [ProbedLayers(parts[name], layers_of[name], None) for name in names]
    if with_baselines:
        # Parts with the same token embeddings share this baseline, which has the name of the first of them.
        tables = {id(parts[name].embed_tokens): parts[name].embed_tokens for name in names}
        owners = [next(part for part in parts.values() if part.embed_tokens is table) for table in tables.values()]
        probed += [ProbedLayers(owner, [PIECES], "pieces") for owner in owners]
        random_parts = parts_of(random_weights(loaded.model, RANDOM_SEED).to(device))
        probed += [ProbedLayers(random_parts[name], layers_of[name], "random") for name in names]
    return probed


def parse_layers(text: str | None, part: ProbedPart) -> list[Layer]:
    """Parse "4,6,mix"; None gives the default layers of the part."""
    if text is None:
        return list(part.default_layers)
    known: dict[str, Layer] = {str(number): number for number in sorted(part.layers)}
    if part.mixed_layers:
        known[MIXTURE] = MIXTURE
    entries = list(dict.fromkeys(entry.strip() for entry in text.split(",")))
    for entry in entries:
        if entry not in known:
            raise UserError(f"{part.name} has no layer {entry}: give --layers some of {', '.join(known)}, or --part")
    return [known[entry] for entry in entries]


def group_by_texts(loaded: LoadedCheckpoint, tasks: Sequence[ProbingTask]) -> list[TextGroup]:
    """Return the tasks that have the same texts together: part-of-speech tags and dependencies of one treebank."""
    by_texts: dict[str, list[ProbingTask]] = {}
    for task in tasks:
        texts = {split: [(one.words, one.spaces) for one in examples] for split, examples in task.splits.items()}
        by_texts.setdefault(content_sha256(texts), []).append(task)
    groups = []
    for group in by_texts.values():
        encoded = {split: encode_split(loaded, examples) for split, examples in group[0].splits.items()}
        targets: dict[str, dict[str, SplitTargets]] = {}
        for task in group:
            counts = ", ".join(f"{split} {len(task.labels_of(split)):,}" for split in task.splits)
            say(f"{task.name}: {len(task.labels)} labels; targets: {counts}", "probe")
            targets[task.name] = {
                split: split_targets(examples, encoded[split], task.labels) for split, examples in task.splits.items()
            }
            for split, of_split in targets[task.name].items():
                if not len(of_split.starts):
                    raise UserError(
                        f"{task.name}: none of the {of_split.num_unread} targets in {split} is within the tokens that the "
                        "model reads: give shorter texts"
                    )
        groups.append(TextGroup(group, encoded, targets))
    return groups


def open_results(
    out: Path, checkpoint: dict[str, Any], settings: dict[str, Any], tasks: Sequence[ProbingTask]
) -> ProbeResults:
    """Return the results of earlier calls in ``out``, or none; refuse those of other weights, settings or data."""
    if not (out / RESULTS_FILE).is_file():
        return ProbeResults(checkpoint, settings | {"data_sha256": {}, "scored_on": {}, "not_read": {}})
    results = read_probe_results(out)
    here = settings | {"checkpoint": checkpoint["sha256"]} | {f"data of {task.name}": task.sha256 for task in tasks}
    there = {name: results.settings.get(name) for name in settings} | {"checkpoint": results.checkpoint.get("sha256")}
    there |= {f"data of {task.name}": results.settings["data_sha256"].get(task.name, task.sha256) for task in tasks}
    if there != here:
        raise UserError(f"{out} holds other results ({first_difference(there, here)}): give another --out")
    return dataclasses.replace(results, checkpoint=checkpoint)


def train_probes(
    loaded: LoadedCheckpoint,
    group: TextGroup,
    probed: ProbedLayers,
    pending: Sequence[tuple[ProbingTask, Layer, int]],
    settings: ProbeSettings,
    device: str,
    results: ProbeResults,
    out: Path,
) -> None:
    part, mixed = probed.part, probed.part.mixed_layers
    wanted = [layer for layer in probed.layers if layer != MIXTURE] + (mixed if MIXTURE in probed.layers else [])
    name = layer_name((part.name, ", ".join(map(str, probed.layers)), probed.baseline))
    pad = loaded.dictionary.pad()
    with stored_features(
        out / "features", part, list(dict.fromkeys(wanted)), group.encoded, pad, device, name
    ) as stored:
        for task, layer, seed in pending:
            began, targets = time.monotonic(), group.targets[task.name]
            add_task(results, task, targets, loaded.model.max_positions())
            used = mixed if layer == MIXTURE else [layer]
            features = {split: [stored[split][number] for number in used] for split in targets}
            column = layer_name((part.name, layer, probed.baseline))
            probe_data = ProbeData(features, targets, task.labels, task.scored_split)
            scored = train_probe(probe_data, settings, seed, device, f"{column}, {task.name}")
            for metric, score in scored.scores.items():
                key = (task.name, part.name, layer, probed.baseline, seed)
                results.results.append(ProbeResult(*key, metric, score, scored.num_targets))
            results.write(out)
            shown = ", ".join(f"{row_name(task.name, metric)} {100 * one:.1f}" for metric, one in scored.scores.items())
            seconds = time.monotonic() - began
            say(f"{column}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")


def add_task(results: ProbeResults, task: ProbingTask, targets: dict[str, SplitTargets], limit: int) -> None:
    """Add, once, what does not depend on a probe: hashes, targets beyond ``limit``, scores of the most frequent label."""
    settings = results.settings
    if task.name in settings["data_sha256"]:
        return
    settings["data_sha256"][task.name] = task.sha256
    settings["scored_on"][task.name] = task.scored_split
    unread = [
        f"{one.num_unread:,} of {one.num_targets:,} in {split}" for split, one in targets.items() if one.num_unread
    ]
    if unread:
        problem = f"targets beyond the {limit} tokens that the model reads are not trained on and count as wrong"
        settings["not_read"][task.name] = f"{task.name}: {problem}: {', '.join(unread)}"
    gold = task.labels_of(task.scored_split)
    for metric, score in majority_scores(task.labels_of("train"), gold).items():
        results.results.append(ProbeResult(task.name, MAJORITY, MAJORITY, MAJORITY, 0, metric, score, len(gold)))


def write_tables(out: Path, results: ProbeResults) -> Table:
    checkpoint, settings, ordered = results.checkpoint, results.settings, in_order(results.results)
    notes = [
        "tasks in the order of their semantic depth (AMOS Figure 4); 100 times the mean over the seeds, ± standard "
        "deviation (divided by n - 1)",
        f"{settings['classifier']} classifier on the frozen states of one layer, sigmoid for each label, "
        f"threshold {THRESHOLD}; weights chosen on the validation split",
        *table_notes(results),
    ]
    (run,) = distinct_names([Path(checkpoint["file"]).resolve().parent])
    title = f"Edge probing of {run} ({checkpoint['model']}) after {checkpoint['num_updates']:,} updates"
    table = results_table(ordered, title, notes)
    with explain_os_errors(f"{out} cannot be written", ": give another --out"):
        results.write(out)
        write_text(out / "table.md", table.as_markdown())
        header = [each.name for each in dataclasses.fields(ProbeResult)]
        write_text(out / "results.csv", csv_text([header, *(asdict(result).values() for result in ordered)]))
        plot_probing(ordered, out)
    return table
