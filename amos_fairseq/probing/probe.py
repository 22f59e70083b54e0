"""``amos probe``: the probe, its training on stored features, its score, micro-F1, and OUT with the results and their table.

A plain loop instead of fairseq-train: the input is a memory map of features, the model a few thousand parameters, an epoch a
second, so that starting the trainer would take longer than the training.

Shapes: N targets, P pieces in all their spans together, D width of the features, C labels.
"""

import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import read_record, write_record
from amos_fairseq.files import distinct_names, file_sha256, whole_folder, write_text
from amos_fairseq.output.terminal import Table, format_score, progress_bar, say
from amos_fairseq.probing.features import (
    EncodedSplit,
    ProbedPart,
    SplitTargets,
    choose_parts,
    encode_split,
    parts_of,
    split_targets,
    stored_features,
)
from amos_fairseq.probing.tasks import ProbingTask

RESULTS_FILE = "results.json"
MAJORITY = "most frequent label"  # the baseline that needs no text
PROJECTION = 256  # width of projected pieces and of the hidden layer of the MLP (Tenney et al., 2019b)
EVALUATIONS = 10  # on the validation split, evenly over the training of a probe
SCORING_BATCH = 8192
# Divided by the square root of the features' width. On the validation splits of pos, dependencies and relations, with three
# layers of a small AMOS model, the linear one is within a point of the best of 0.05, 0.15, 0.5 and 1.5; mlp was not compared.
LEARNING_RATES = {"linear": 0.5, "mlp": 0.01}
THRESHOLD = 0.5  # of the probability of a label


def micro_f1(predicted: Tensor, labels: Tensor, num_impossible: int = 0) -> float:
    """Return F1 = 2 TP / (2 TP + FP + FN) of ``predicted`` and ``labels`` [N,C] bool, over all of them together, from 0 to 1; 0
    without any label. ``num_impossible``: further labels that hold, which training has not seen."""
    true_positives = int((predicted & labels).sum())
    total = int(predicted.sum()) + int(labels.sum()) + num_impossible
    return 2 * true_positives / total if total else 0.0


def majority_score(train: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> float:
    """Return the micro-F1 of a classifier that always answers the most frequent label of training, on the labels ``gold``."""
    counts = Counter(label for labels in train for label in labels)
    answer = min(counts, key=lambda label: (-counts[label], label))
    total = len(gold) + sum(map(len, gold))
    return 2 * sum(answer in labels for labels in gold) / total if total else 0.0


class SpanFeatures(NamedTuple):
    """The pieces of N spans, one span after another."""

    features: Tensor  # [P,D]
    lengths: Tensor  # [N] int64, the number of pieces of each span, at least 1; their sum is P


class SpanPooling(nn.Module):
    """Self-attention pooling of a span (Tenney et al., 2019b, section 3.1).

        r = sum_i a_i x_i,  a = softmax(w . x_i)      i: the pieces of the span

    w starts at 0: the initial output is the mean.
    """

    def __init__(self, width: int):
        super().__init__()
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, pieces: SpanFeatures) -> Tensor:
        """Return [N,D]. Spans are not padded: long ones cost short ones nothing."""
        x, lengths = pieces
        owner = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)  # [P], the span of each piece
        scores = self.score(x).squeeze(-1)  # [P]
        largest = scores.new_full(lengths.shape, -torch.inf).scatter_reduce(0, owner, scores.detach(), "amax")
        weights = (scores - largest[owner]).exp().unsqueeze(-1)  # [P,1]
        total = weights.new_zeros(len(lengths), 1).index_add(0, owner, weights)
        return x.new_zeros(len(lengths), x.size(1)).index_add(0, owner, weights * x) / total


class Probe(nn.Module):
    """Logits of every label for targets of one or two spans; each span has its own pooling. ``width`` is D.

    ``linear`` is AMOS's: one linear layer on the pooled states (section 5.2). ``mlp`` is that of Tenney et al. (2019b): a
    projection before the pooling, and then a hidden layer with tanh and LayerNorm.
    """

    def __init__(self, width: int, num_spans: int, num_labels: int, classifier: str = "linear"):
        super().__init__()
        is_linear = classifier == "linear"
        pooled = width if is_linear else PROJECTION
        self.projections = nn.ModuleList(
            nn.Identity() if is_linear else nn.Linear(width, PROJECTION) for _ in range(num_spans)
        )
        self.poolings = nn.ModuleList(SpanPooling(pooled) for _ in range(num_spans))
        hidden = [nn.Linear(num_spans * pooled, PROJECTION), nn.Tanh(), nn.LayerNorm(PROJECTION)]
        self.hidden = nn.Identity() if is_linear else nn.Sequential(*hidden)
        self.output = nn.Linear(num_spans * pooled if is_linear else PROJECTION, num_labels)
        nn.init.zeros_(self.output.weight)

    @torch.no_grad()
    def set_prior(self, frequencies: Tensor) -> None:
        """Let the untrained probe predict each label with its frequency [C] in training."""
        self.output.bias.copy_(frequencies.clamp(1e-4, 1 - 1e-4).logit())

    def forward(self, spans: list[SpanFeatures]) -> Tensor:
        """Return [N,C] float32 from the first and, if there is one, the second span of every target."""
        pooled = [
            pooling(SpanFeatures(projection(pieces.features), pieces.lengths))
            for pieces, projection, pooling in zip(spans, self.projections, self.poolings, strict=True)
        ]
        return self.output(self.hidden(torch.cat(pooled, dim=-1)))


def probe_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of logits z and labels y [N,C], summed over the C labels, mean over N targets, in nats.

    L = 1/N sum_n sum_c -[y_nc log s(z_nc) + (1 - y_nc) log(1 - s(z_nc))],  s = sigmoid
    """
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return loss / len(logits)


@dataclass(frozen=True)
class ProbeSettings:
    """How every probe of a table is trained: Adam, with a learning rate that falls linearly to 0."""

    classifier: str = "linear"  # or mlp, see Probe
    lr: float = LEARNING_RATES["linear"]  # initial one, which is divided by the square root of the features' width
    batch_size: int = 1024  # targets of an update
    updates: int = 2000  # for every task, whatever its size


@dataclass(frozen=True)
class ProbeData:
    features: dict[str, Tensor]  # of each split, [P,D]
    targets: dict[str, SplitTargets]
    labels: Sequence[str]  # C names
    scored_split: str


class ProbeScore(NamedTuple):
    """micro-F1 from 0 to 1, and the update whose weights were scored."""

    score: float
    update: int


def train_probe(data: ProbeData, settings: ProbeSettings, seed: int, device: str, name: str = "probe") -> ProbeScore:
    """Train a probe on ``train``, keep the weights with the best micro-F1 on ``valid`` (then the lowest loss), score them.

    ``seed`` determines the initial weights and the order of the targets; on a CPU the result is the same to the bit.
    """
    batches, train = Batches(data, device), data.targets["train"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(batches.width, train.starts.size(1), len(data.labels), settings.classifier)
    probe.set_prior(train.labels.float().mean(0))
    probe.to(device)
    optimizer = torch.optim.Adam(probe.parameters(), lr=settings.lr / math.sqrt(batches.width))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.updates)
    best: tuple[tuple[float, float], int, dict[str, Tensor]] | None = None
    updates = enumerate(shuffled_batches(len(train.starts), settings, seed), start=1)
    with progress_bar(settings.updates, name, "update", delay=2) as bar:
        for update, rows in updates:
            optimizer.zero_grad()
            probe_loss(probe(batches.spans("train", rows)), train.labels[rows].to(device)).backward()
            optimizer.step()
            schedule.step()
            bar.update()
            if update % max(1, settings.updates // EVALUATIONS) == 0 or update == settings.updates:
                logits = probe_logits(probe, batches, "valid")
                loss = float(probe_loss(logits, data.targets["valid"].labels))
                if not math.isfinite(loss):
                    raise UserError(f"the loss of a probe is {loss} after {update} updates: give a lower --lr")
                score = (micro_f1_of(logits, data.targets["valid"]), -loss)
                if best is None or score > best[0]:
                    best = score, update, {key: tensor.clone() for key, tensor in probe.state_dict().items()}
    probe.load_state_dict(best[2])
    logits = probe_logits(probe, batches, data.scored_split)
    return ProbeScore(micro_f1_of(logits, data.targets[data.scored_split]), best[1])


def shuffled_batches(num_targets: int, settings: ProbeSettings, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each update; every epoch has its own order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(num_targets, generator=generator).split(settings.batch_size) for _ in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), settings.updates)


class Batches:
    """Features of the pieces of chosen targets, whitened with the mean and covariance of the training text's pieces.

    Whitening changes nothing that a linear classifier can express, but lets it learn from every direction equally fast: in the
    last layers of a discriminator most of the variance has one direction, that of its decision (docs/probing.md).
    """

    def __init__(self, data: ProbeData, device: str):
        self.data = data
        self.device = device
        self.mean, self.matrix = whitening(data.features["train"])
        self.width = data.features["train"].size(1)

    def spans(self, split: str, rows: Tensor) -> list[SpanFeatures]:
        """Return the pieces of the first and the second spans of the targets ``rows`` [N] int64."""
        targets = self.data.targets[split]
        return [
            self._pieces(split, starts, lengths)
            for starts, lengths in zip(targets.starts[rows].T, targets.lengths[rows].T, strict=True)
        ]

    def _pieces(self, split: str, starts: Tensor, lengths: Tensor) -> SpanFeatures:
        before = lengths.cumsum(0) - lengths
        index = (starts - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
        features = (self.data.features[split][index] - self.mean) @ self.matrix
        return SpanFeatures(features.to(self.device), lengths.to(self.device))


def whitening(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean m [D] and the symmetric matrix W [D,D], float32, for which (x - m) W has the identity as covariance.

        W = U diag(1 / sqrt(max(l, 1e-8 max(l)))) U^T,  covariance = U diag(l) U^T

    Among all such matrices the symmetric one changes x least. The floor keeps directions without variance, such as the one that
    LayerNorm removes, from being blown up.
    """
    total = torch.zeros(features.size(1), dtype=torch.float64)
    products = torch.zeros(features.size(1), features.size(1), dtype=torch.float64)
    for chunk in features.split(1 << 15):
        total += chunk.double().sum(0)
    mean = total / len(features)
    for chunk in features.split(1 << 15):
        centered = chunk.double() - mean
        products += centered.T @ centered
    variances, directions = torch.linalg.eigh(products / len(features))
    deviations = variances.clamp(min=max(1e-8 * float(variances[-1]), 1e-30)).sqrt()
    return mean.float(), ((directions / deviations) @ directions.T).float()


@torch.no_grad()
def probe_logits(probe: Probe, batches: Batches, split: str) -> Tensor:
    """Return the logits [N,C] of a split, on the CPU."""
    rows = torch.arange(len(batches.data.targets[split].starts))
    return torch.cat([probe(batches.spans(split, part)).cpu() for part in rows.split(SCORING_BATCH)])


def micro_f1_of(logits: Tensor, targets: SplitTargets) -> float:
    return micro_f1(logits.sigmoid() > THRESHOLD, targets.labels, targets.num_impossible)


@dataclass(frozen=True)
class ProbeResult:
    """The score of one probe."""

    task: str
    layer: str  # such as "generator 4"
    seed: int  # of the probe; 0 for the most frequent label, which has none
    score: float  # micro-F1, from 0 to 1
    targets: int  # number of targets that the score counts


@dataclass(frozen=True)
class ProbeResults:
    """The content of ``results.json``: what was probed how, and every score."""

    checkpoint: dict[str, Any]  # file, sha256, model, num_updates
    settings: dict[str, Any]  # of the probes; and data_sha256, of the files by task and split
    notes: list[str]  # what a reader of the scores must know besides the settings
    results: list[ProbeResult]  # in the order of the tasks, and of the layers in the table

    @classmethod
    def of_record(cls, results: list[dict[str, Any]], **others: Any) -> "ProbeResults":
        return cls(results=[ProbeResult(**result) for result in results], **others)

    def table(self) -> Table:
        """Return 100 times the mean scores, ± the standard deviation over the seeds, by layer and task."""
        scores: dict[tuple[str, str], list[float]] = {}
        for result in self.results:
            scores.setdefault((result.layer, result.task), []).append(100 * result.score)
        layers, tasks = (list(dict.fromkeys(names)) for names in zip(*scores, strict=True))
        rows = [[layer, *(mean_cell(scores.get((layer, task), [])) for task in tasks)] for layer in layers]
        notes = [
            "tasks in the order of their semantic depth (AMOS Figure 4); 100 times the mean over the seeds, ± standard "
            "deviation (divided by n - 1)",
            f"{self.settings['classifier']} classifier on the frozen states of one layer, sigmoid for each label, "
            f"threshold {THRESHOLD}; weights chosen on the validation split",
            *self.notes,
        ]
        (run,) = distinct_names([Path(self.checkpoint["file"]).resolve().parent])
        updates = f"{self.checkpoint['num_updates']:,} updates"
        title = f"Edge probing of {run} ({self.checkpoint['model']}) after {updates}"
        return Table(title, ["layer", *tasks], rows, notes)


def mean_cell(scores: Sequence[float]) -> str:
    mean = statistics.mean(scores) if scores else None
    return format_score(mean, statistics.stdev(scores) if len(scores) > 1 else None)


def read_probe_results(folder: Path) -> ProbeResults | None:
    """Return the content of ``results.json`` in a folder that ``amos probe`` wrote; None if there is no file."""
    return read_record(folder / RESULTS_FILE, ProbeResults.of_record, "results of amos probe", "amos probe")


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
    num_seeds: int = 1,
    device: str = "cpu",
) -> Table:
    """Train every probe, write ``results.json`` and ``table.md`` to the new folder ``out``, and return the table."""
    known = parts_of(loaded.model)
    chosen = [(known[name], parse_layers(layers, known[name])) for name in choose_parts(loaded, known, parts)]
    groups = group_by_texts(loaded, tasks)
    results = []
    with whole_folder(out.absolute()) as unfinished:
        for group, (part, numbers) in itertools.product(groups, chosen):
            results += train_probes(loaded, group, part, numbers, settings, num_seeds, device, unfinished / "features")
        for task in tasks:
            gold = task.labels_of(task.scored_split)
            score = majority_score(task.labels_of("train"), gold)
            results.append(ProbeResult(task.name, MAJORITY, 0, score, len(gold)))
        names = [task.name for task in tasks]
        results.sort(key=lambda result: names.index(result.task))
        checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
        checkpoint |= {"model": type(loaded.model).__name__, "num_updates": loaded.num_updates}
        fixed = {"features": "whitened", "threshold": THRESHOLD}
        fixed["data_sha256"] = {task.name: task.sha256 for task in tasks}
        notes = list(notes_on(groups, loaded.model.max_positions()))
        content = ProbeResults(checkpoint, asdict(settings) | fixed, notes, results)
        write_record(unfinished / RESULTS_FILE, asdict(content))
        write_text(unfinished / "table.md", content.table().as_markdown())
        return content.table()


def parse_layers(text: str | None, part: ProbedPart) -> list[int]:
    """Parse "4,6"; None gives the default layers of the part."""
    if text is None:
        return list(part.default_layers)
    known = {str(number): number for number in sorted(part.layers)}
    entries = list(dict.fromkeys(entry.strip() for entry in text.split(",")))
    for entry in entries:
        if entry not in known:
            raise UserError(f"{part.name} has no layer {entry}: give --layers some of {', '.join(known)}, or --part")
    return [known[entry] for entry in entries]


def group_by_texts(loaded: LoadedCheckpoint, tasks: Sequence[ProbingTask]) -> list[TextGroup]:
    """Return the tasks that have the same texts together: part-of-speech tags and dependencies of one treebank."""
    by_texts: dict[str, list[ProbingTask]] = {}
    for task in tasks:
        texts = {split: [(text.words, text.spaces) for text in texts] for split, texts in task.splits.items()}
        by_texts.setdefault(json.dumps(texts), []).append(task)
    groups = []
    for group in by_texts.values():
        encoded = {split: encode_split(loaded, texts) for split, texts in group[0].splits.items()}
        groups.append(TextGroup(group, encoded, {task.name: targets_of(task, encoded) for task in group}))
    return groups


def targets_of(task: ProbingTask, encoded: dict[str, EncodedSplit]) -> dict[str, SplitTargets]:
    targets = {split: split_targets(texts, encoded[split], task.labels) for split, texts in task.splits.items()}
    for split, split_target in targets.items():
        if not len(split_target.starts):
            raise UserError(
                f"{task.name}: none of the {split_target.num_unread} targets in {split} is within the tokens that the model "
                "reads: give shorter texts"
            )
    return targets


def train_probes(
    loaded: LoadedCheckpoint,
    group: TextGroup,
    part: ProbedPart,
    layers: Sequence[int],
    settings: ProbeSettings,
    num_seeds: int,
    device: str,
    folder: Path,
) -> list[ProbeResult]:
    """Train the probes of ``layers`` of one network, whose features are in ``folder`` meanwhile."""
    results, pad = [], loaded.dictionary.pad()
    with stored_features(folder, part, layers, group.encoded, pad, device) as stored:
        for task, layer, seed in itertools.product(group.tasks, layers, range(1, num_seeds + 1)):
            began, targets, name = time.monotonic(), group.targets[task.name], f"{part.name} {layer}"
            features = {split: stored[split][layer] for split in targets}
            probe_data = ProbeData(features, targets, task.labels, task.scored_split)
            scored = train_probe(probe_data, settings, seed, device, f"{name}, {task.name}")
            num_targets = targets[task.scored_split].num_targets
            results.append(ProbeResult(task.name, name, seed, scored.score, num_targets))
            shown, seconds = f"{task.name} {100 * scored.score:.1f}", time.monotonic() - began
            say(f"{name}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")
    return results


def notes_on(groups: Sequence[TextGroup], limit: int) -> Iterable[str]:
    """Yield what a reader of the scores must know besides the settings of the probes."""
    tasks = [(task, group.targets[task.name]) for group in groups for task in group.tasks]
    for task, targets in tasks:
        unread = [
            f"{part.num_unread:,} of {part.num_targets:,} in {split}"
            for split, part in targets.items()
            if part.num_unread
        ]
        if unread:
            problem = f"targets beyond the {limit} tokens that the model reads are not trained on and count as wrong"
            yield f"{task.name}: {problem}: {', '.join(unread)}"
    if on_valid := [task.name for task, _ in tasks if task.scored_split == "valid"]:
        yield f"{', '.join(on_valid)}: no test split; scored on the validation split, like the choice of weights"
    yield "most frequent label: the one of the training split as the answer for every target"
