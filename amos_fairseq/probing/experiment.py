"""One call of ``amos probe``: which probes to train, their features, and the results in OUT.

OUT/results.json                                  the results so far, written after every probe
OUT/results.csv, table.md, probing.png, .svg      made of them at the end
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.results import content_sha256
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import csv_text, file_sha256, first_difference, locked, write_text
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.probing.features import (
    MIXTURE,
    PIECES,
    EncodedSplit,
    Layer,
    ProbedPart,
    default_parts,
    encode_split,
    parts_of,
    random_weights,
    stored_features,
)
from amos_fairseq.probing.results import (
    MAJORITY,
    RESULTS_FILE,
    ProbeResult,
    in_order,
    layer_name,
    plot_probing,
    read_probe_results,
    results_table,
    row_name,
    table_notes,
    write_results,
)
from amos_fairseq.probing.scores import majority_scores
from amos_fairseq.probing.targets import ProbingTask, read_task, task_names
from amos_fairseq.probing.training import THRESHOLD, ProbeData, ProbeSettings, SplitTargets, split_targets, train_probe

LOCK_FILE = ".amos_probe.lock"
RANDOM_SEED = 1  # of the random weights, the same for every seed of a probe


@dataclass(frozen=True)
class ProbedLayers:
    """Layers of one network, and the baseline that they are."""

    part: ProbedPart
    layers: list[Layer]
    baseline: str | None

    @property
    def name(self) -> str:
        names = [str(layer) for layer in self.layers]
        return layer_name((self.part.name, ", ".join(names), self.baseline))

    @property
    def stored_layers(self) -> list[Layer]:
        """The layers whose features are computed; a mixture needs all."""
        mixed = self.part.mixed_layers if MIXTURE in self.layers else []
        return list(dict.fromkeys([layer for layer in self.layers if layer != MIXTURE] + mixed))

    def features_of(self, layer: Layer, stored: dict[Layer, torch.Tensor]) -> list[torch.Tensor]:
        return [stored[each] for each in (self.part.mixed_layers if layer == MIXTURE else [layer])]


@dataclass(frozen=True)
class TextGroup:
    """Tasks with the same texts, these texts as pieces, and the targets by task and split."""

    tasks: list[ProbingTask]
    encoded: dict[str, EncodedSplit]
    targets: dict[str, dict[str, SplitTargets]]


@dataclass
class Results:
    """The content of OUT/results.json."""

    out: Path
    checkpoint: dict[str, Any]
    settings: dict[str, Any]
    data_sha256: dict[str, dict[str, str]] = field(default_factory=dict)  # of the files of each task
    not_read: dict[str, str] = field(default_factory=dict)  # task -> a note on targets beyond the model's length
    results: list[ProbeResult] = field(default_factory=list)

    def take_over(self, tasks: Sequence[ProbingTask]) -> None:
        """Take the results of earlier calls; raise :class:`UserError` if they are of something else."""
        content = read_probe_results(self.out)
        here = {"checkpoint": self.checkpoint["sha256"], "settings": self.settings}
        there = {
            "checkpoint": content["checkpoint"].get("sha256"),
            "settings": {name: value for name, value in content["settings"].items() if name in self.settings},
        }
        if there != here:
            raise UserError(
                f"{self.out} holds results with other settings ({first_difference(there, here)}): give another --out"
            )
        self.data_sha256 = dict(content["settings"].get("data_sha256", {}))
        self.not_read = dict(content["settings"].get("not_read", {}))
        self.results = [ProbeResult(**result) for result in content["results"]]
        for task in tasks:
            if self.data_sha256.get(task.name, task.sha256) != task.sha256:
                raise UserError(
                    f"{self.out} holds results of {task.name} on other files than those in --data: give another --out"
                )

    def has(self, task: str, probed: ProbedLayers, layer: Layer, seed: int) -> bool:
        key = (task, probed.part.name, layer, probed.baseline, seed)
        return any((one.task, *one.column, one.seed) == key for one in self.results)

    def begin_task(self, task: ProbingTask, note: str | None) -> None:
        """Add what does not depend on a probe, once: hashes, the note, and the scores of the most frequent label."""
        if task.name in self.data_sha256:
            return
        self.data_sha256[task.name] = task.sha256
        if note is not None:
            self.not_read[task.name] = note
        gold = task.labels_of(task.scored_split)
        for metric, score in majority_scores(task.labels_of("train"), gold).items():
            self.results.append(ProbeResult(task.name, MAJORITY, MAJORITY, MAJORITY, 0, metric, score, len(gold)))

    @property
    def all_settings(self) -> dict[str, Any]:
        scored_on = {task: "test" if "test" in files else "valid" for task, files in self.data_sha256.items()}
        return self.settings | {"data_sha256": self.data_sha256, "scored_on": scored_on, "not_read": self.not_read}

    def write(self) -> None:
        write_results(self.out, self.checkpoint, self.all_settings, self.results)

    def write_tables(self) -> Table:
        """Write all files of OUT, and return the table."""
        notes = [
            "tasks in the order of their semantic depth (AMOS Figure 4); 100 times the mean over the seeds, ± standard "
            "deviation (divided by n - 1)",
            f"{self.settings['classifier']} classifier on the frozen states of one layer, sigmoid for each label, "
            f"threshold {THRESHOLD}; weights chosen on the validation split",
            *table_notes(self.results, self.all_settings),
        ]
        run, updates = Path(self.checkpoint["file"]).resolve().parent.name, self.checkpoint["num_updates"]
        title = f"Edge probing of {run} ({self.checkpoint['model']}) after {updates:,} updates"
        results = in_order(self.results)
        table = results_table(results, title, notes)
        with explain_os_errors(f"{self.out} cannot be written", ": give another --out"):
            self.write()
            write_text(self.out / "table.md", table.as_markdown())
            lines = [[each.name for each in fields(ProbeResult)], *(asdict(result).values() for result in results)]
            write_text(self.out / "results.csv", csv_text(lines))
            plot_probing(results, str(self.out))
        return table


def run_probes(
    loaded: LoadedCheckpoint,
    data: Path,
    out: Path,
    settings: ProbeSettings,
    *,
    parts: Sequence[str] | None = None,
    layers: str | None = None,
    tasks: str | None = None,
    with_baselines: bool = False,
    num_seeds: int = 1,
    device: str = "cpu",
) -> Table:
    """Train every probe that has no result in ``out`` yet, write all files there, and return the table."""
    read = [read_task(data, name) for name in task_names(data, tasks)]
    for task in read:
        counts = ", ".join(f"{split} {len(task.labels_of(split)):,}" for split in task.splits)
        say(f"read {task.name}: {len(task.labels)} labels; targets: {counts}", "probe")
    chosen = choose_layers(loaded, parts, layers, with_baselines, device)
    groups = group_by_texts(loaded, read)
    checkpoint = {
        "file": str(loaded.file),
        "sha256": file_sha256(loaded.file),
        "model": type(loaded.model).__name__,
        "num_updates": loaded.num_updates,
    }
    fixed = {"features": "whitened", "threshold": THRESHOLD, "random_weights_seed": RANDOM_SEED}
    results = Results(out, checkpoint, asdict(settings) | fixed)
    with explain_os_errors(f"{out} cannot be written", ": give another --out"):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK_FILE, f"another amos probe is writing to {out}", "wait until it has ended"):
        if (out / RESULTS_FILE).is_file():
            results.take_over(read)
        for group in groups:
            for probed in chosen:
                pending = [
                    (task, layer, seed)
                    for task in group.tasks
                    for layer in probed.layers
                    for seed in range(1, num_seeds + 1)
                    if not results.has(task.name, probed, layer, seed)
                ]
                if pending:
                    train_probes(loaded, group, probed, pending, settings, device, results)
        return results.write_tables()


def choose_layers(
    loaded: LoadedCheckpoint, names: Sequence[str] | None, layers: str | None, with_baselines: bool, device: str
) -> list[ProbedLayers]:
    parts = parts_of(loaded.model)
    names = list(dict.fromkeys(names or default_parts(parts)))
    for name in names:
        if name not in parts:
            raise UserError(f"{loaded.file} has no part {name!r}: give one of {', '.join(parts)}")
    layers_of = {name: parse_layers(layers, parts[name]) for name in names}
    probed = [ProbedLayers(parts[name], numbers, None) for name, numbers in layers_of.items()]
    if with_baselines:
        # Parts with the same token embeddings share this baseline, which has the name of the first of them.
        tables = {id(parts[name].embed_tokens): parts[name].embed_tokens for name in names}
        owners = [next(part for part in parts.values() if part.embed_tokens is table) for table in tables.values()]
        probed += [ProbedLayers(owner, [PIECES], "pieces") for owner in owners]
        random_parts = parts_of(random_weights(loaded.model, RANDOM_SEED).to(device))
        probed += [ProbedLayers(random_parts[name], numbers, "random") for name, numbers in layers_of.items()]
    return probed


def group_by_texts(loaded: LoadedCheckpoint, tasks: Sequence[ProbingTask]) -> list[TextGroup]:
    """Return the tasks that have the same texts together: part-of-speech tags and dependencies of one treebank."""
    by_texts: dict[str, list[ProbingTask]] = {}
    for task in tasks:
        texts = {split: [one.words for one in examples] for split, examples in task.splits.items()}
        by_texts.setdefault(content_sha256(texts), []).append(task)
    groups = []
    num_texts = sum(len(texts) for group in by_texts.values() for texts in group[0].splits.values())
    with progress_bar(num_texts, "encode", "text", delay=2) as bar:
        for group in by_texts.values():
            splits = group[0].splits
            encoded = {split: encode_split(loaded, texts, bar.update) for split, texts in splits.items()}
            groups.append(TextGroup(group, encoded, {task.name: readable_targets(task, encoded) for task in group}))
    return groups


def train_probes(
    loaded: LoadedCheckpoint,
    group: TextGroup,
    probed: ProbedLayers,
    pending: Sequence[tuple[ProbingTask, Layer, int]],
    settings: ProbeSettings,
    device: str,
    results: Results,
) -> None:
    """Compute the features of the layers once, and train the probes on them."""
    pad = loaded.dictionary.pad()
    with stored_features(
        results.out / "features", probed.part, probed.stored_layers, group.encoded, pad, device, probed.name
    ) as stored:
        for task, layer, seed in pending:
            began = time.monotonic()
            targets = group.targets[task.name]
            results.begin_task(task, note_on_unread(task.name, targets, loaded.model.max_positions()))
            features = {split: probed.features_of(layer, each) for split, each in stored.items() if split in targets}
            probe_data = ProbeData(features, targets, task.labels, task.scored_split)
            column = layer_name((probed.part.name, layer, probed.baseline))
            with progress_bar(settings.updates, f"{column}, {task.name}", "update", delay=2) as bar:
                scored = train_probe(probe_data, settings, seed, device, bar.update)
            key = (task.name, probed.part.name, layer, probed.baseline, seed)
            results.results += [ProbeResult(*key, *score, scored.num_targets) for score in scored.scores.items()]
            results.write()
            shown = ", ".join(f"{row_name(task.name, metric)} {100 * one:.1f}" for metric, one in scored.scores.items())
            seconds = time.monotonic() - began
            say(f"{column}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")


def note_on_unread(task: str, targets: dict[str, SplitTargets], limit: int) -> str | None:
    counts = {split: each.num_unread for split, each in targets.items() if each.num_unread}
    if not counts:
        return None
    listed = ", ".join(f"{n:,} of {targets[split].num_targets:,} in {split}" for split, n in counts.items())
    return f"{task}: targets beyond the {limit} tokens that the model reads are not trained on and count as wrong: {listed}"


def readable_targets(task: ProbingTask, encoded: dict[str, EncodedSplit]) -> dict[str, SplitTargets]:
    """Return the targets of each split."""
    targets = {split: split_targets(examples, encoded[split], task.labels) for split, examples in task.splits.items()}
    for split, own in targets.items():
        if not len(own.starts):
            raise UserError(
                f"{task.name}: none of the {own.num_unread} targets in {split} is within the tokens that the model reads: "
                "give shorter texts, or leave the task out with --tasks"
            )
    return targets


def parse_layers(text: str | None, part: ProbedPart) -> list[Layer]:
    """Parse "4,6,mix"; None gives the default layers of the part."""
    if text is None:
        return list(part.default_layers)
    entries = [entry.strip() for entry in text.split(",")]
    if wrong := [entry for entry in entries if entry != MIXTURE and not entry.isdecimal()]:
        raise UserError(
            f"--layers {text!r}: {wrong[0]!r} is no layer: give numbers and {MIXTURE}, such as 4,6,{MIXTURE}"
        )
    layers: list[Layer] = [entry if entry == MIXTURE else int(entry) for entry in dict.fromkeys(entries)]
    part.check_layers(layers)
    return layers
