"""Attention heads as relations: how often the word that a head attends to most is the syntactic head (thesis, Figure 2.8).

The method is that of Clark et al. 2019a ("What Does BERT Look At?"), without training: of each word, and for each attention
head, the other word with the most attention is the prediction of its syntactic head. Attention to a word is the sum over its
pieces, attention from a word the mean over its pieces; special tokens do not count.

Departure: only attention from a word to its head is counted, not from the head to the word.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, json_text, write_text
from amos_fairseq.functional.attention import AttentionBias, attention_weights
from amos_fairseq.functional.positions import Rotation
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.output.pictures import PANEL_INCHES, RC_PARAMS, figure_of_panels, run_colour, save
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import progress_bar
from amos_fairseq.probing.features import (
    RANDOM_SEED,
    EncodedSplit,
    ProbedPart,
    choose_parts,
    encode_split,
    parts_of,
    random_weights,
)
from amos_fairseq.probing.tasks import ProbingTask

TOKENS_PER_BATCH = 2048
FARTHEST = 10  # of the offsets of the baseline
LEAST_TARGETS = 100  # of a relation in the table
ALL = "all relations"


@contextlib.contextmanager
def recorded_attention(encoder: TransformerEncoder) -> Iterator[list[Tensor]]:
    """Yield a list that gets the attention weights of each layer in order, [B,H,T,T], while ``encoder`` runs."""
    weights: list[Tensor] = []

    def attend(heads: Tensor, bias: AttentionBias, dropout: float, rotation: Rotation | None = None) -> Tensor:
        weights.append(attention_weights(heads, bias, rotation))
        return (weights[-1].to(heads.dtype) @ heads[:, :, 2].transpose(1, 2)).transpose(1, 2)

    shape, kept = encoder.shape, [(layer.attention, layer.attention.attend) for layer in encoder.layers]
    encoder.shape = dataclasses.replace(shape, kernels="reference")  # the fused kernels have no weights
    for attention, _ in kept:
        attention.attend = attend
    try:
        yield weights
    finally:
        encoder.shape = shape
        for attention, before in kept:
            attention.attend = before


def check_finite(part: ProbedPart, weights: Tensor) -> None:
    if not torch.isfinite(weights).all():
        raise UserError(f"the attention of {part.name} is not finite: its training diverged")


def attention_between_words(weights: Tensor, words: Sequence[tuple[int, int]]) -> Tensor:
    """Return how much each word attends to each other one: [...,T,T] -> [...,W,W], -1 for a word to itself.

    ``words``: places of the pieces of each word (first, end).
    """
    pieces = torch.zeros(len(words), weights.size(-1), dtype=weights.dtype)
    for word, (start, end) in enumerate(words):
        pieces[word, start:end] = 1
    pieces = pieces.to(weights.device)
    to_words = weights @ pieces.T
    between = (pieces / pieces.sum(1, keepdim=True)) @ to_words
    return between.masked_fill(torch.eye(len(words), dtype=torch.bool, device=weights.device), -1)


class Counts(NamedTuple):
    heads: np.ndarray  # [layers, heads, relations]
    offsets: np.ndarray  # [2 * FARTHEST + 1, relations], of the words at a fixed distance, from -FARTHEST on
    totals: np.ndarray  # [relations]


@torch.no_grad()
def count_heads(
    part: ProbedPart,
    task: ProbingTask,
    split: str,
    encoded: EncodedSplit,
    relations: Sequence[str],
    pad: int,
    device: str,
) -> Counts:
    encoder = next(iter(part.layers.values()))[0]
    column_of = {relation: index for index, relation in enumerate(relations)}
    heads = np.zeros((len(encoder.layers), encoder.shape.num_heads, len(relations)), dtype=np.int64)
    offsets, totals = np.zeros((2 * FARTHEST + 1, len(relations)), dtype=np.int64), np.zeros(len(relations), np.int64)
    starts = np.cumsum([0, *(len(sentence) - 2 for sentence in encoded.sentences)])
    lengths = [len(sentence) for sentence in encoded.sentences]
    with progress_bar(len(lengths), f"attention of {part.name}, {split}", "sentence", delay=2) as bar:
        for batch in batches_by_length(lengths, TOKENS_PER_BATCH):
            tokens = pad_sequence([encoded.sentences[i] for i in batch], batch_first=True, padding_value=pad).to(device)
            with recorded_attention(encoder) as weights:
                encoder(part.embed_tokens(tokens), tokens.eq(pad))
            for row, i in enumerate(batch):
                words = [word for word, pieces in enumerate(encoded.word_pieces[i]) if pieces is not None]
                arcs = [(t.spans[0][0], t.spans[1][0], relation_of(t.labels)) for t in task.splits[split][i].targets]
                place = {word: index for index, word in enumerate(words)}
                arcs = [arc for arc in arcs if arc[0] in place and arc[1] in place and arc[2] in column_of]
                if not arcs:
                    continue
                pieces = [tuple(np.array(encoded.word_pieces[i][word]) - starts[i] + 1) for word in words]
                dependents, gold = (np.array([place[arc[side]] for arc in arcs]) for side in (0, 1))
                columns = np.array([column_of[arc[2]] for arc in arcs])
                np.add.at(totals, columns, 1)
                of_layers = torch.stack([of_layer[row] for of_layer in weights])  # [layers,H,T,T]
                check_finite(part, of_layers)
                most = attention_between_words(of_layers, pieces).argmax(-1).cpu().numpy()  # [layers,H,W]
                right = most[..., dependents] == gold
                np.add.at(heads, (..., columns), right)
                distances = np.array([arc[1] - arc[0] for arc in arcs])
                near = np.abs(distances) <= FARTHEST
                np.add.at(offsets, (distances[near] + FARTHEST, columns[near]), 1)
            bar.update(len(batch))
    return Counts(heads, offsets, totals)


def relation_of(labels: Sequence[str]) -> str:
    """Return the relation of a target without its subtype; empty without one."""
    return labels[0].partition(":")[0] if labels else ""


class Row(NamedTuple):
    relation: str
    count: int
    layer: int
    head: int
    accuracy: float
    offset: int
    offset_accuracy: float


def best_heads(chosen_on: Counts, scored_on: Counts, relations: Sequence[str]) -> list[Row]:
    """Return a row for all relations together and for each one, the most frequent first.

    The best attention head and the best offset are chosen on one split; their accuracy is that on another.
    """
    groups = {ALL: np.arange(len(relations))} | {relation: np.array([i]) for i, relation in enumerate(relations)}
    rows = []
    for name, columns in groups.items():
        count = int(scored_on.totals[columns].sum())
        if count < LEAST_TARGETS or not chosen_on.totals[columns].sum():
            continue
        layer, head = np.unravel_index(chosen_on.heads[..., columns].sum(-1).argmax(), chosen_on.heads.shape[:2])
        offset = int(chosen_on.offsets[:, columns].sum(-1).argmax())
        accuracy, baseline = (
            100 * float(right.sum()) / count
            for right in (scored_on.heads[layer, head, columns], scored_on.offsets[offset, columns])
        )
        rows.append(Row(name, count, int(layer) + 1, int(head) + 1, accuracy, offset - FARTHEST, baseline))
    return sorted(rows, key=lambda row: -row.count)


def probe_attention(
    loaded: LoadedCheckpoint,
    task: ProbingTask,
    out: Path,
    names: Sequence[str] | None,
    with_baseline: bool,
    device: str,
) -> Table:
    """Compare the attention heads of the parts ``names`` (None: all) with the heads of a treebank.

    ``with_baseline`` adds random weights. Writes ``attention.json``, ``.md``, ``.csv``, ``.png`` and ``.svg`` into ``out``, and
    returns the table.
    """
    networks = {name: part for name, part in parts_of(loaded.model).items() if part.mixed_layers}
    parts = {name: networks[name] for name in choose_parts(loaded, networks, names)}
    if with_baseline:
        random = parts_of(random_weights(loaded.model, RANDOM_SEED).to(device))
        parts |= {f"{name}, random": random[name] for name in parts}
    splits, pad = ["valid", task.scored_split], loaded.dictionary.pad()
    encoded = {split: encode_split(loaded, task.splits[split]) for split in splits}
    relations = sorted({relation_of(labels) for split in splits for labels in task.labels_of(split)} - {""})
    best: dict[str, list[Row]] = {}
    for name, part in parts.items():
        counts = [count_heads(part, task, split, encoded[split], relations, pad, device) for split in splits]
        best[name] = best_heads(*counts, relations)
    if not any(best.values()):
        raise UserError(f"no relation has {LEAST_TARGETS} words in {' and '.join(splits)}: give a larger treebank")
    rows = []
    for of_parts in zip(*best.values(), strict=True):
        row = of_parts[0]
        heads = [f"{one.accuracy:.1f} ({one.layer}-{one.head})" for one in of_parts]
        rows.append([row.relation, f"{row.count:,}", f"{row.offset_accuracy:.1f} ({row.offset:+d})", *heads])
    notes = (
        "accuracy in percent: the word with the most attention is the head of the word; in brackets layer and attention head",
        "offset: the word at a fixed distance, in brackets",
        f"attention head and offset are those that are best on valid; scored on {task.scored_split}",
        f"relations without their subtypes, with {LEAST_TARGETS} words and more; the root is left out",
    )
    table = Table("attention heads as relations", ["", "words", "offset", *best], rows, notes)
    content = {name: [row._asdict() for row in rows] for name, rows in best.items()}
    with explain_write_errors(out, "permit writing, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        table.save(out / "attention")
        write_text(out / "attention.json", json_text(content))
        plot_attention(best, out)
    return table


@matplotlib.rc_context(RC_PARAMS)
def plot_attention(best: dict[str, list[Row]], out: Path) -> None:
    figure, (ax,) = figure_of_panels(1, 1)
    first = next(iter(best.values()))
    relations, series = [row.relation for row in first], {"offset": [row.offset_accuracy for row in first]}
    series |= {name: [row.accuracy for row in rows] for name, rows in best.items()}
    figure.set_size_inches(PANEL_INCHES[0] * 1.4, 2 + 0.08 * len(relations) * (len(series) + 1))
    for index, (name, values) in enumerate(series.items()):
        places = np.arange(len(relations)) + index / (len(series) + 1)
        ax.barh(places, values, 0.9 / (len(series) + 1), label=name, color=run_colour(index))
    ax.set_yticks(np.arange(len(relations)) + (len(series) - 1) / 2 / (len(series) + 1), relations)
    ax.margins(y=0.01)
    ax.invert_yaxis()
    ax.set_xlabel("the most attended word is the head (%)")
    ax.grid(axis="x", alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2)
    save(figure, out, "attention")
