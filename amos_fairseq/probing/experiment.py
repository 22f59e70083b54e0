"""One call of ``amos probe``: which probes to train, their features, and the results in OUT.

OUT/results.json                                  the results so far, written after every probe
OUT/results.csv, table.md, probing.png, .svg      made of them at the end
OUT/features/                                     memory maps, removed as soon as their probes are trained
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.results import content_sha256
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import csv_text, first_difference, take_lock, write_text
from amos_fairseq.fingerprint import file_sha256
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
        own = self.part.mixed_layers if MIXTURE in self.layers else []
        return list(dict.fromkeys([layer for layer in self.layers if layer != MIXTURE] + own))

    def features_of(self, layer: Layer, stored: dict[Layer, torch.Tensor]) -> list[torch.Tensor]:
        return [stored[own] for own in (self.part.mixed_layers if layer == MIXTURE else [layer])]


class Experiment:
    """The arguments of the command, checked, and the results in OUT.

    Raises:
        UserError: an argument cannot be used, or OUT has results of another checkpoint, other settings or other data.
    """

    def __init__(
        self,
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
    ):
        self.loaded, self.data, self.out, self.settings = loaded, data, out, settings
        self.device, self.seeds = device, range(1, num_seeds + 1)
        self.tasks = []
        for name in task_names(data, tasks):
            self.tasks.append(task := read_task(data, name))
            counts = ", ".join(f"{split} {len(task.labels_of(split)):,}" for split in task.splits)
            say(f"read {name}: {len(task.labels)} labels; targets: {counts}", "probe")
        self.probed = self._choose(parts, layers, with_baselines)
        self.groups = self._groups()
        self.checkpoint = {
            "file": str(loaded.file),
            "sha256": file_sha256(loaded.file),
            "model": type(loaded.model).__name__,
            "num_updates": loaded.num_updates,
        }
        self.data_sha256: dict[str, dict[str, str]] = {}
        self.unread: dict[str, str] = {}
        self.results: list[ProbeResult] = []
        with explain_os_errors(f"{out} cannot be written", ": give another --out"):
            out.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(
                out / LOCK_FILE, f"another amos probe is writing to {out}", "wait until it has ended"
            )
        if (out / RESULTS_FILE).is_file():
            self._continue(read_probe_results(out))

    def _choose(self, names: Sequence[str] | None, layers: str | None, with_baselines: bool) -> list[ProbedLayers]:
        parts = parts_of(self.loaded.model)
        names = list(dict.fromkeys(names or default_parts(parts)))
        for name in names:
            if name not in parts:
                raise UserError(f"{self.loaded.file} has no part {name!r}: give one of {', '.join(parts)}")
        chosen = {name: parse_layers(layers, parts[name]) for name in names}
        probed = [ProbedLayers(parts[name], own, None) for name, own in chosen.items()]
        if with_baselines:
            # Parts with the same token embeddings share this baseline, which has the name of the first of them.
            tables = {id(parts[name].embed_tokens): parts[name].embed_tokens for name in names}
            owners = [next(p for p in parts.values() if p.embed_tokens is table) for table in tables.values()]
            probed += [ProbedLayers(owner, [PIECES], "pieces") for owner in owners]
            random_parts = parts_of(random_weights(self.loaded.model, RANDOM_SEED).to(self.device))
            probed += [ProbedLayers(random_parts[name], own, "random") for name, own in chosen.items()]
        return probed

    def _continue(self, found: dict[str, Any]) -> None:
        given = {"checkpoint": self.checkpoint["sha256"], "settings": self._settings()}
        stored = {
            "checkpoint": found["checkpoint"].get("sha256"),
            "settings": {name: value for name, value in found["settings"].items() if name in given["settings"]},
        }
        if stored != given:
            raise UserError(
                f"{self.out} holds results with other settings ({first_difference(stored, given)}): give another --out"
            )
        self.data_sha256 = dict(found["settings"].get("data_sha256", {}))
        self.unread = dict(found["settings"].get("not_read", {}))
        self.results = [ProbeResult(**result) for result in found["results"]]
        for task in self.tasks:
            if self.data_sha256.get(task.name, task.sha256) != task.sha256:
                raise UserError(
                    f"{self.out} holds results of {task.name} on other files than {self.data / task.name}: give another --out"
                )

    def _settings(self) -> dict[str, Any]:
        fixed = {"features": "whitened", "threshold": THRESHOLD, "random_weights_seed": RANDOM_SEED}
        return asdict(self.settings) | fixed

    def run(self) -> Table:
        """Train every probe that has no result yet, write all files of OUT, and return the table.

        Raises:
            UserError: bad data, or OUT cannot be written.
        """
        for group in self.groups:
            for probed in self.probed:
                pending = [
                    (task, layer, seed)
                    for task in group.tasks
                    for layer in probed.layers
                    for seed in self.seeds
                    if not self._is_done(task.name, probed, layer, seed)
                ]
                if pending:
                    self._train(group, probed, pending)
        shutil.rmtree(self.out / "features", ignore_errors=True)
        for task in self.tasks:
            self._add_majority(task)  # to results without it, of an earlier version
        return self._write_tables()

    def _add_majority(self, task: ProbingTask) -> None:
        """Add the scores of always answering the most frequent label, unless the results have them."""
        if any(one.task == task.name and one.baseline == MAJORITY for one in self.results):
            return
        gold = task.labels_of(task.scored_split)
        for metric, score in majority_scores(task.labels_of("train"), gold).items():
            self.results.append(ProbeResult(task.name, MAJORITY, MAJORITY, MAJORITY, 0, metric, score, len(gold)))

    def _groups(self) -> list["TextGroup"]:
        """Return the tasks that have the same texts together: part-of-speech tags and dependencies of one treebank."""
        by_texts: dict[str, list[ProbingTask]] = {}
        for task in self.tasks:
            texts = {split: [one.words for one in examples] for split, examples in task.splits.items()}
            by_texts.setdefault(content_sha256(texts), []).append(task)
        groups = []
        num_texts = sum(len(texts) for own in by_texts.values() for texts in own[0].splits.values())
        with progress_bar(num_texts, "encode", "text", delay=2) as bar:
            for texts_sha256, own in by_texts.items():
                splits = own[0].splits
                encoded = {split: encode_split(self.loaded, texts, bar.update) for split, texts in splits.items()}
                targets = {task.name: readable_targets(task, encoded) for task in own}
                groups.append(TextGroup(texts_sha256, own, encoded, targets))
        return groups

    def _train(self, group: "TextGroup", probed: ProbedLayers, pending: list[tuple[ProbingTask, Layer, int]]) -> None:
        name = content_sha256([group.texts_sha256, self.checkpoint, probed.name])[:16]
        folder = self.out / "features" / name
        pad = self.loaded.dictionary.pad()
        stored = stored_features(
            folder, probed.part, probed.stored_layers, group.encoded, pad, self.device, probed.name
        )
        for task, layer, seed in pending:
            began = time.monotonic()
            targets = group.targets[task.name]
            self.data_sha256[task.name] = task.sha256
            self._note_unread(task, targets)
            self._add_majority(task)
            data = ProbeData(
                {split: probed.features_of(layer, layers) for split, layers in stored.items() if split in targets},
                targets,
                task.labels,
                task.scored_split,
            )
            column = layer_name((probed.part.name, layer, probed.baseline))
            with progress_bar(self.settings.updates, f"{column}, {task.name}", "update", delay=2) as bar:
                scored = train_probe(data, self.settings, seed, self.device, bar.update)
            for metric, score in scored.scores.items():
                self.results.append(
                    ProbeResult(
                        task.name, probed.part.name, layer, probed.baseline, seed, metric, score, scored.num_targets
                    )
                )
            write_results(self.out, self.checkpoint, self._all_settings(), self.results)
            shown = ", ".join(f"{row_name(task.name, metric)} {100 * one:.1f}" for metric, one in scored.scores.items())
            seconds = time.monotonic() - began
            say(f"{column}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")
        shutil.rmtree(folder)

    def _is_done(self, task: str, probed: ProbedLayers, layer: Layer, seed: int) -> bool:
        key = (task, probed.part.name, layer, probed.baseline, seed)
        return any((one.task, *one.column, one.seed) == key for one in self.results)

    def _all_settings(self) -> dict[str, Any]:
        scored_on = {task: "test" if "test" in files else "valid" for task, files in self.data_sha256.items()}
        return self._settings() | {"data_sha256": self.data_sha256, "scored_on": scored_on, "not_read": self.unread}

    def _note_unread(self, task: ProbingTask, targets: dict[str, SplitTargets]) -> None:
        counts = {split: own.num_unread for split, own in targets.items() if own.num_unread}
        if counts and task.name not in self.unread:
            listed = ", ".join(f"{n:,} of {targets[split].num_targets:,} in {split}" for split, n in counts.items())
            limit = self.loaded.model.max_positions()
            self.unread[task.name] = (
                f"{task.name}: targets beyond the {limit} tokens that the model reads are not trained on and "
                f"count as wrong: {listed}"
            )

    def _write_tables(self) -> Table:
        settings = self.settings
        notes = [
            "tasks in the order of their semantic depth (AMOS Figure 4); 100 times the mean over the seeds, ± standard "
            "deviation (divided by n - 1)",
            f"{settings.classifier} classifier on the frozen states of one layer, sigmoid for each label, threshold "
            f"{THRESHOLD}; weights chosen on the validation split",
            *table_notes(self.results, self._all_settings()),
        ]
        run, updates = Path(self.checkpoint["file"]).resolve().parent.name, self.checkpoint["num_updates"]
        title = f"Edge probing of {run} ({self.checkpoint['model']}) after {updates:,} updates"
        results = in_order(self.results)
        table = results_table(results, title, notes)
        with explain_os_errors(f"{self.out} cannot be written", ": give another --out"):
            write_results(self.out, self.checkpoint, self._all_settings(), self.results)
            write_text(self.out / "table.md", table.as_markdown())
            lines = [[field.name for field in fields(ProbeResult)], *(asdict(result).values() for result in results)]
            write_text(self.out / "results.csv", csv_text(lines))
            plot_probing(results, str(self.out))
        return table


@dataclass(frozen=True)
class TextGroup:
    """Tasks with the same texts, these texts as pieces, and the targets by task and split."""

    texts_sha256: str
    tasks: list[ProbingTask]
    encoded: dict[str, EncodedSplit]
    targets: dict[str, dict[str, SplitTargets]]


def readable_targets(task: ProbingTask, encoded: dict[str, EncodedSplit]) -> dict[str, SplitTargets]:
    """Return the targets of each split.

    Raises:
        UserError: the model can read none of a split.
    """
    targets = {split: split_targets(examples, encoded[split], task.labels) for split, examples in task.splits.items()}
    for split, own in targets.items():
        if not len(own.starts):
            raise UserError(
                f"{task.name}: none of the {own.num_unread} targets in {split} is within the tokens that the model reads: "
                "give shorter texts, or leave the task out with --tasks"
            )
    return targets


def parse_layers(text: str | None, part: ProbedPart) -> list[Layer]:
    """Parse "4,6,mix"; None gives the default layers of the part.

    Raises:
        UserError: an entry is neither a number nor ``mix``, or the part has no such layer.
    """
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
