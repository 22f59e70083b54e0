"""Sentence vectors before and after training, compared on pairs of texts (``amos adapt --check-similarity``)."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import normalize

from amos_fairseq.checkpoints.encoder import load
from amos_fairseq.downstream.texts.scores import correlation
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.sentence_files import pooling_of
from amos_fairseq.inputs.input_files import TableFile
from amos_fairseq.inputs.labels import is_missing, parse_number
from amos_fairseq.inputs.rows import LABEL_COLUMNS, TEXT_COLUMNS, read_rows

FEWEST_PAIRS = 10


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of texts, each with a number that says how similar they are."""

    file: str
    sha256: str
    first: list[str]
    second: list[str]
    scores: list[float]


def read_pairs(file: Path) -> ScoredPairs:
    """Read a table such as STS-B's ``dev.tsv``; rows that lack a text or the number are left out."""
    columns = TableFile(file, all_keys=True).columns
    texts = next((names for names in TEXT_COLUMNS if len(names) == 2 and set(names) <= set(columns)), None)
    score = next((name for name in LABEL_COLUMNS if name in columns), None)
    if texts is None or score is None:
        needed = "two columns of texts and one of numbers, with names such as sentence1, sentence2 and score"
        raise UserError(f"--check-similarity {file} needs {needed}; it has {shorten(', '.join(columns), 300)}")
    rows = read_rows(file, texts, score)
    pairs = ScoredPairs(file.name, rows.sha256, [], [], [])
    for line, (first, second), value in zip(rows.ids, rows.texts, rows.labels, strict=True):
        if not any(is_missing(each) for each in (first, second, value)):
            pairs.first.append(first)
            pairs.second.append(second)
            try:
                pairs.scores.append(parse_number(value))
            except ValueError as error:
                raise UserError(f"{file}, line {line}, column {score}: {error}") from error
    if len(pairs.scores) < FEWEST_PAIRS or len(set(pairs.scores)) == 1:
        raise UserError(f"{file} has {len(pairs.scores)} pairs: give {FEWEST_PAIRS} or more, with different scores")
    return pairs


def similarity(checkpoint: Path, pairs: ScoredPairs) -> dict[str, float]:
    """Return :func:`agreement` for a checkpoint: vectors are pooled as its sentence-transformers files say, else means."""
    encoder = load(checkpoint)  # on the CPU: the GPU belongs to the process that trains
    pooling = pooling_of(encoder.model.sentence_files)
    first, second = (
        torch.cat([features.pooled(pooling).cpu() for features in encoder.stream(texts, truncate=True)])
        for texts in (pairs.first, pairs.second)
    )
    return agreement(first, second, pairs.scores)


def agreement(first: Tensor, second: Tensor, scores: list[float]) -> dict[str, float]:
    """Compare the vectors of pairs, [N,D] each, with their scores.

    Returns:
        spearman: rank correlation of cos(first_i, second_i) with score i, in percent.
        cosine_of_unrelated_texts: the mean over i of cos(first_i, second_j), where row j is half the table away from row i:
            neighbors are often about the same.
    """
    first, second = (normalize(vectors.double(), dim=-1) for vectors in (first, second))
    unrelated = second.roll(len(second) // 2, dims=0)
    return {
        "spearman": 100 * correlation(spearmanr, (first * second).sum(-1).numpy(), np.array(scores)),
        "cosine_of_unrelated_texts": (first * unrelated).sum(-1).mean().item(),
    }


def describe(similar: dict[str, float]) -> str:
    spearman, cosine = similar["spearman"], similar["cosine_of_unrelated_texts"]
    return f"Spearman {spearman:.1f}, mean cosine of unrelated texts {cosine:.3f}"
