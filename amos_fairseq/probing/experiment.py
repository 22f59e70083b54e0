"""One call of ``amos probe``: the layers and tasks that it probes, their features, and the results in OUT."""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256, whole_folder
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
from amos_fairseq.probing.results import MAJORITY, ProbeResult, ProbeResults, layer_name, row_name
from amos_fairseq.probing.tasks import ProbingTask

SplitTexts = dict[str, list[tuple[list[str], list[bool] | None]]]


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
    """Train every probe, write all files to the new folder ``out``, and return the table."""
    chosen = choose_layers(loaded, parts, layers, with_baselines, device)
    groups = group_by_texts(loaded, tasks)
    results = [result for task in tasks for result in majority_results(task)]
    with whole_folder(out.absolute()) as unfinished:
        for group, probed in itertools.product(groups, chosen):
            results += train_probes(loaded, group, probed, settings, num_seeds, device, unfinished / "features")
        checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
        checkpoint |= {"model": type(loaded.model).__name__, "num_updates": loaded.num_updates}
        fixed = {"features": "whitened", "threshold": THRESHOLD, "random_weights_seed": RANDOM_SEED}
        fixed["data_sha256"] = {task.name: task.sha256 for task in tasks}
        notes = list(notes_on(groups, results, loaded.model.max_positions()))
        return ProbeResults(checkpoint, asdict(settings) | fixed, notes, results).write(unfinished)


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
    by_texts: list[tuple[SplitTexts, list[ProbingTask]]] = []
    for task in tasks:
        texts = {split: [(one.words, one.spaces) for one in examples] for split, examples in task.splits.items()}
        same = next((group for others, group in by_texts if others == texts), None)
        if same is None:
            by_texts.append((texts, [task]))
        else:
            same.append(task)
    groups = []
    for _, group in by_texts:
        encoded = {split: encode_split(loaded, examples) for split, examples in group[0].splits.items()}
        groups.append(TextGroup(group, encoded, {task.name: targets_of(task, encoded) for task in group}))
    return groups


def targets_of(task: ProbingTask, encoded: dict[str, EncodedSplit]) -> dict[str, SplitTargets]:
    targets = {split: split_targets(examples, encoded[split], task.labels) for split, examples in task.splits.items()}
    for split, one in targets.items():
        if not len(one.starts):
            raise UserError(
                f"{task.name}: none of the {one.num_unread} targets in {split} is within the tokens that the model reads: "
                "give shorter texts"
            )
    return targets


def majority_results(task: ProbingTask) -> list[ProbeResult]:
    """Return the scores of the most frequent label of training as the answer for every target."""
    gold = task.labels_of(task.scored_split)
    scores = majority_scores(task.labels_of("train"), gold)
    return [
        ProbeResult(task.name, MAJORITY, MAJORITY, MAJORITY, 0, metric, score, len(gold))
        for metric, score in scores.items()
    ]


def train_probes(
    loaded: LoadedCheckpoint,
    group: TextGroup,
    probed: ProbedLayers,
    settings: ProbeSettings,
    num_seeds: int,
    device: str,
    folder: Path,
) -> list[ProbeResult]:
    """Train the probes of all layers of one network, whose features are in ``folder`` meanwhile."""
    part, mixed, results = probed.part, probed.part.mixed_layers, []
    wanted = [layer for layer in probed.layers if layer != MIXTURE] + (mixed if MIXTURE in probed.layers else [])
    name = layer_name((part.name, ", ".join(map(str, probed.layers)), probed.baseline))
    pad = loaded.dictionary.pad()
    with stored_features(folder, part, list(dict.fromkeys(wanted)), group.encoded, pad, device, name) as stored:
        for task, layer, seed in itertools.product(group.tasks, probed.layers, range(1, num_seeds + 1)):
            began, targets = time.monotonic(), group.targets[task.name]
            used = mixed if layer == MIXTURE else [layer]
            features = {split: [stored[split][number] for number in used] for split in targets}
            column = layer_name((part.name, layer, probed.baseline))
            probe_data = ProbeData(features, targets, task.labels, task.scored_split)
            scored = train_probe(probe_data, settings, seed, device, f"{column}, {task.name}")
            for metric, score in scored.scores.items():
                key = (task.name, part.name, layer, probed.baseline, seed)
                results.append(ProbeResult(*key, metric, score, scored.num_targets))
            shown = ", ".join(f"{row_name(task.name, metric)} {100 * one:.1f}" for metric, one in scored.scores.items())
            seconds = time.monotonic() - began
            say(f"{column}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")
    return results


def notes_on(groups: Sequence[TextGroup], results: Sequence[ProbeResult], limit: int) -> Iterable[str]:
    """Yield what a reader of the scores must know besides the settings of the probes."""
    tasks = [(task, group.targets[task.name]) for group in groups for task in group.tasks]
    for task, targets in tasks:
        unread = [
            f"{one.num_unread:,} of {one.num_targets:,} in {split}" for split, one in targets.items() if one.num_unread
        ]
        if unread:
            problem = f"targets beyond the {limit} tokens that the model reads are not trained on and count as wrong"
            yield f"{task.name}: {problem}: {', '.join(unread)}"
    if on_valid := [task.name for task, _ in tasks if task.scored_split == "valid"]:
        yield f"{', '.join(on_valid)}: no test split; scored on the validation split, like the choice of weights"
    baselines = {one.baseline for one in results}
    if "random" in baselines:
        yield f"random weights: the same architecture, newly initialized with seed {RANDOM_SEED}"
    if "pieces" in baselines:
        yield "pieces alone: the trained token embeddings, without positions and layers"
    yield "most frequent label: the one of the training split as the answer for every target"
