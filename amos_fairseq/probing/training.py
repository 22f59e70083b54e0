"""Train a probe on stored features and score it.

A plain loop instead of fairseq-train: the input is a memory map of features, the model a few thousand parameters, an epoch a
second, so that starting the trainer would take longer than the training.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.probing.features import EncodedSplit
from amos_fairseq.probing.probe import Probe, SpanFeatures, probe_loss
from amos_fairseq.probing.scores import MICRO_F1, SEMEVAL_MACRO_F1, is_semeval, micro_f1, semeval_macro_f1
from amos_fairseq.probing.targets import AnnotatedText

EVALUATIONS = 10  # on the validation split, evenly over the training of a probe
SCORING_BATCH = 8192
# Divided by the square root of the features' width. On the validation splits of pos, dependencies and relations, with three
# layers of a small AMOS model, the linear one is within a point of the best of 0.05, 0.15, 0.5 and 1.5; mlp was not compared.
LEARNING_RATES = {"linear": 0.5, "mlp": 0.01}
THRESHOLD = 0.5  # of the probability of a label


@dataclass(frozen=True)
class ProbeSettings:
    """How every probe of a table is trained: Adam, with a learning rate that falls linearly to 0.

    Attributes:
        classifier: linear or mlp, see :class:`Probe`.
        lr: initial learning rate, which is divided by the square root of the features' width.
        batch_size: targets of an update.
        updates: the same number for every task, whatever its size.
    """

    classifier: str = "linear"
    lr: float = LEARNING_RATES["linear"]
    batch_size: int = 1024
    updates: int = 2000


class SplitTargets(NamedTuple):
    """The N targets of a split that the model can read, S spans each, and those that count as wrong.

    Attributes:
        starts: [N,S] int64, first piece of each span, counted over the split.
        lengths: [N,S] int64, pieces of each span.
        labels: [N,C] bool.
        gold: the labels as they are in the file, of the N targets and then of those without features.
        num_impossible: labels that training has not seen, and all labels of targets without features.
        num_unread: targets without features, beyond the model's ``max_positions``.
    """

    starts: Tensor
    lengths: Tensor
    labels: Tensor
    gold: list[tuple[str, ...]]
    num_impossible: int
    num_unread: int

    @property
    def num_targets(self) -> int:
        """The number of targets that the scores count."""
        return len(self.starts) + self.num_unread


def split_targets(examples: Sequence[AnnotatedText], encoded: EncodedSplit, labels: Sequence[str]) -> SplitTargets:
    """Convert spans of words to spans of pieces, and labels to a matrix.

    A target of which a word was cut off is not read.
    """
    index = {label: number for number, label in enumerate(labels)}
    spans, rows, columns, gold, unread, num_impossible = [], [], [], [], [], 0
    for example, words in zip(examples, encoded.word_pieces, strict=True):
        for target in example.targets:
            pieces = [_pieces(words, span) for span in target.spans]
            if None in pieces:
                unread.append(target.labels)
                num_impossible += len(target.labels)
                continue
            known = [index[label] for label in target.labels if label in index]
            num_impossible += len(target.labels) - len(known)
            rows += [len(spans)] * len(known)
            columns += known
            spans.append(pieces)
            gold.append(target.labels)
    matrix = torch.zeros(len(spans), len(labels), dtype=torch.bool)
    matrix[rows, columns] = True
    bounds = torch.tensor(spans)  # [N,S,2]
    starts, ends = bounds.unbind(-1) if spans else (torch.zeros(0, 1, dtype=torch.int64),) * 2
    return SplitTargets(starts, ends - starts, matrix, gold + unread, num_impossible, len(unread))


def _pieces(words: Sequence[tuple[int, int] | None], span: tuple[int, int]) -> tuple[int, int] | None:
    """Return the pieces of a span of words; None if one of them was cut off."""
    first, last = words[span[0]], words[span[1] - 1]
    return None if last is None else (first[0], last[1])


@dataclass(frozen=True)
class ProbeData:
    """One layer's features of one task.

    Attributes:
        features: of each split, [P,D] for each layer: one, or those that are mixed.
        labels: C names.
    """

    features: dict[str, list[Tensor]]
    targets: dict[str, SplitTargets]
    labels: Sequence[str]
    scored_split: str


class ProbeScores(NamedTuple):
    """Scores from 0 to 1 by metric, over ``num_targets``; the update whose weights were scored."""

    scores: dict[str, float]
    num_targets: int
    update: int


def train_probe(
    data: ProbeData,
    settings: ProbeSettings,
    seed: int,
    device: str,
    on_update: Callable[[], object] = lambda: None,
) -> ProbeScores:
    """Train a probe on ``train``, keep the weights with the best micro-F1 on ``valid`` (then the lowest loss), score them.

    ``seed`` determines the initial weights and the order of the targets; on a CPU the result is the same to the bit.
    """
    batches, train = Batches(data, device), data.targets["train"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        num_layers = len(data.features["train"])
        num_mixed = num_layers if num_layers > 1 else 0
        probe = Probe(batches.width, train.starts.size(1), len(data.labels), settings.classifier, num_mixed)
    probe.set_prior(train.labels.float().mean(0))
    probe.to(device)
    optimizer = torch.optim.Adam(probe.parameters(), lr=settings.lr / math.sqrt(batches.width))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.updates)
    best: tuple[tuple[float, float], int, dict[str, Tensor]] | None = None
    for update, rows in enumerate(shuffled_batches(len(train.starts), settings, seed), start=1):
        optimizer.zero_grad()
        probe_loss(probe(batches.spans("train", rows)), train.labels[rows].to(device)).backward()
        optimizer.step()
        schedule.step()
        on_update()
        if update % max(1, settings.updates // EVALUATIONS) == 0 or update == settings.updates:
            logits = probe_logits(probe, batches, "valid")
            loss = float(probe_loss(logits, data.targets["valid"].labels))
            if not math.isfinite(loss):
                raise UserError(f"the loss of a probe is {loss} after {update} updates: give a lower --lr")
            score = (micro_f1_of(logits, data.targets["valid"]), -loss)
            if best is None or score > best[0]:
                best = score, update, {name: tensor.clone() for name, tensor in probe.state_dict().items()}
    probe.load_state_dict(best[2])
    scored = data.targets[data.scored_split]
    logits = probe_logits(probe, batches, data.scored_split)
    scores = {MICRO_F1: micro_f1_of(logits, scored)}
    if is_semeval(data.labels) and all(len(labels) == 1 for labels in scored.gold):
        scores[SEMEVAL_MACRO_F1] = semeval_of(logits, scored, data.labels)
    return ProbeScores(scores, scored.num_targets, best[1])


def shuffled_batches(num_targets: int, settings: ProbeSettings, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each update; every epoch has its own order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(num_targets, generator=generator).split(settings.batch_size) for _ in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(epochs), settings.updates)


class Batches:
    """Features of the pieces of chosen targets, whitened with the mean and covariance of the training text's pieces.

    Whitening changes nothing that a linear classifier can express, but lets it learn from every direction equally fast. In the
    last layers of a discriminator most of the variance has one direction, that of its decision (docs/probing.md); a probe that
    is trained on these states as they are, or with each dimension standardized, has learned little else when it ends.
    """

    def __init__(self, data: ProbeData, device: str):
        self.data = data
        self.device = device
        self.whitenings = [whitening(layer) for layer in data.features["train"]]
        self.width = data.features["train"][0].size(1)

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
        layers = [
            (layer[index] - mean) @ matrix
            for layer, (mean, matrix) in zip(self.data.features[split], self.whitenings, strict=True)
        ]
        features = layers[0] if len(layers) == 1 else torch.stack(layers, dim=1)
        return SpanFeatures(features.to(self.device), lengths.to(self.device))


def whitening(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean m [D] and the symmetric matrix W [D,D], float32, for which (x - m) W has the identity as covariance.

        W = U diag(1 / sqrt(max(l, 1e-8 max(l)))) U^T,  covariance = U diag(l) U^T

    Among all such matrices the symmetric one changes x least, so that whitened layers can still be mixed. The floor keeps
    directions without variance, such as the one that LayerNorm removes, from being blown up.

    Args:
        features: [P,D] float32.
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


def semeval_of(logits: Tensor, targets: SplitTargets, labels: Sequence[str]) -> float:
    """Score the most probable label of each target; those that were not read have no prediction."""
    predicted = [labels[i] for i in logits.argmax(-1).tolist()] + [None] * targets.num_unread
    return semeval_macro_f1([one for (one,) in targets.gold], predicted)
