"""Minimal pairs: how often a model scores the grammatical one of two sentences higher, without fine-tuning.

A file has a JSON object on each line, as the 67 files of BLiMP (Warstadt et al., 2020)::

    {"sentence_good": "These dogs bark.", "sentence_bad": "This dogs bark.", "UID": "...", "linguistics_term": "..."}

A pair counts 1 if the good sentence has the higher score, 1/2 if both scores are equal, else 0. Accuracy is the mean in percent
of each UID, of each term, and of all pairs; chance is 50. Scores are sums over the pieces, not divided by their number, as in
BLiMP and Salazar et al. (2020): the PLL of mlm and electric, and log P(original) of discriminators
(:class:`~amos_fairseq.scoring.token_scorers.DetectionScorer`).
"""

import dataclasses
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import data_utils

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.corpus import corpus_directories, count_tokens, require_split
from amos_fairseq.data.vocabulary import shard_directories
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import DICTIONARY_FILE, csv_text, distinct_names, file_sha256, json_text, write_text
from amos_fairseq.inputs.file_kinds import FOLDER, kind_and_compression, kind_of, refuse_many_brackets
from amos_fairseq.inputs.input_files import read_lines
from amos_fairseq.output.tables import Table, format_score
from amos_fairseq.probing.features import RANDOM_SEED, random_weights
from amos_fairseq.scoring import PAIR_SUFFIXES
from amos_fairseq.scoring.lines import DECIMALS, EncodedLine, encoded_lines, score_lines, with_unknown_pieces
from amos_fairseq.scoring.token_scorers import DetectionScorer, build_pair_scorer
from amos_fairseq.strangers import LONGEST_NAME, parse_json, plain_name
from amos_fairseq.text import special_ids
from amos_fairseq.text.tokenization.tokenizer import read_dictionary_symbols

FORMAT = 1
NO_TERM = "-"
LONGEST_SENTENCE = 1_000_000  # characters
UNIGRAM, RANDOM = "unigram", "random weights"
PLL = "sum of log p(piece | all others), the pseudo-log-likelihood, in nats"
DETECTION = "sum of log P(original) by the discriminator, in nats: no probability of a sentence, but an order"
HINT = 'each line must be an object with the strings "sentence_good" and "sentence_bad"'


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences, of which the first is grammatical, and where they come from. ``line`` counts from 1."""

    file: Path
    line: int
    good: str
    bad: str
    uid: str
    term: str

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class Accuracy:
    """Number of pairs, of those whose good sentence has the higher score, and of those with equal scores."""

    pairs: int
    right: int
    ties: int

    @property
    def percent(self) -> float:
        return 100 * (self.right + self.ties / 2) / self.pairs

    def interval(self) -> tuple[float, float]:
        """Return the limits of the 95 % interval of Wilson (1927), in percent, as if the pairs were independent.

        With p the accuracy as a fraction, n the number of pairs and z = 1.96:

            (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

        A tie counts one half, which varies less than a right or wrong pair: with ties the interval is wider than needed.
        """
        p, n, z = self.percent / 100, self.pairs, statistics.NormalDist().inv_cdf(0.975)
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
        low, high = ((centre + sign * half) / (1 + z * z / n) for sign in (-1, 1))
        return 100 * max(0.0, low), 100 * min(1.0, high)


@dataclass(frozen=True)
class Column:
    """Scores of all pairs by one model: ``scores`` are (good, bad), larger is better; ``definition`` says what they are."""

    name: str
    definition: str
    scores: list[tuple[float, float]]

    def accuracy(self, members: Sequence[int]) -> Accuracy:
        """Return the accuracy on the pairs with these indices."""
        pairs = [self.scores[index] for index in members]
        right = sum(good > bad for good, bad in pairs)
        return Accuracy(len(pairs), right, ties=sum(good == bad for good, bad in pairs))


def read_pairs(paths: Sequence[Path]) -> tuple[list[MinimalPair], list[dict[str, Any]]]:
    """Read all pairs of JSON lines, which may be compressed; return them, and path, sha256 and number of pairs of each file."""
    pairs: list[MinimalPair] = []
    records = []
    if twice := [path for path, number in Counter(map(os.path.realpath, paths)).items() if number > 1]:
        raise UserError(f"--pairs names {twice[0]} twice, and its pairs would count twice: give each file once")
    for path in paths:
        if kind_of(path) == FOLDER:
            raise UserError(f"{path} is a folder: give files of JSON lines with --pairs")
        before = len(pairs)
        for number, line in read_lines(path):
            if line.strip():
                pairs.append(parse_pair(line, path, number))
        if len(pairs) == before:
            raise UserError(f"{path} has no pairs: {HINT}")
        records.append({"file": str(path), "sha256": file_sha256(path), "pairs": len(pairs) - before})
    return pairs, records


def parse_pair(line: str, path: Path, number: int) -> MinimalPair:
    """Return the pair of a line of JSON; other fields are ignored. Without a UID it has the name of its file."""
    refuse_many_brackets(line, path, number)
    suffixes = "".join(kind_and_compression(path))
    fields = {"UID": path.name[: len(path.name) - len(suffixes)] or path.name, "linguistics_term": NO_TERM}
    try:
        fields |= parse_json(line)
        good, bad = (_field(fields, name, LONGEST_SENTENCE) for name in ("sentence_good", "sentence_bad"))
        uid, term = (_field(fields, name, LONGEST_NAME) for name in ("UID", "linguistics_term"))
    except ValueError as error:
        raise UserError(f"{path}, line {number}: {error}; {HINT}") from error
    return MinimalPair(path, number, good, bad, uid, term)


def _field(fields: dict[str, Any], name: str, longest: int) -> str:
    try:
        return plain_name(fields.get(name), longest)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def encode_pairs(
    loaded: LoadedCheckpoint, pairs: Sequence[MinimalPair]
) -> tuple[list[MinimalPair], list[tuple[EncodedLine, EncodedLine]]]:
    """Return the pairs that the model can read, without those with a sentence longer than its limit, and their sentences."""
    limit = loaded.model.max_positions()
    encoded = encoded_lines(loaded, (text for pair in pairs for text in (pair.good, pair.bad)))
    readable, sentences = [], []
    for pair, good, bad in zip(pairs, encoded, encoded, strict=True):  # the lines of a pair follow one another
        for name, line in (("sentence_good", good), ("sentence_bad", bad)):
            if not line.pieces:
                raise UserError(f"{pair.place}: {name} has no character that the tokenizer keeps: write a sentence")
        if max(len(good.tokens), len(bad.tokens)) <= limit:
            readable.append(pair)
            sentences.append((good, bad))
    if not readable:
        raise UserError(
            f"every pair has a sentence of more than {limit} tokens, the limit of {loaded.file}: give shorter sentences, "
            "or a model of longer texts"
        )
    return readable, sentences


def unigram_log_probs(loaded: LoadedCheckpoint, corpus: str) -> torch.Tensor:
    """Return log p of each token by its share in the training text of a corpus, DIR or DIR0:DIR1: [dictionary] float64, in
    nats.

    With c(x) the count of the piece x, N the sum of the counts and V the number of pieces, special tokens left out,

        log p(x) = log((c(x) + 1) / (N + V))

    The counts are those of the binarized text: ``dict.txt`` has a count for each piece, but this package writes 1.
    """
    dictionary, symbols = loaded.dictionary, loaded.tokenizer.dictionary_symbols
    paths = []
    for directory in corpus_directories(shard_directories(corpus)):
        require_split(str(directory / "train"))
        if read_dictionary_symbols(directory / DICTIONARY_FILE) != symbols:
            raise UserError(
                f"--corpus {directory} has another dictionary than {loaded.file}: give the corpus of its pretraining"
            )
        paths.append(str(directory / "train"))
    texts = (data_utils.load_indexed_dataset(path, dictionary, combine=True) for path in paths)
    counts = count_tokens(texts, len(dictionary)).double()
    counts[special_ids(dictionary)] = 0
    return ((counts + 1) / (counts.sum() + len(symbols))).log()


def unigram_score(log_probs: torch.Tensor, line: EncodedLine) -> float:
    """Return the sum of the pieces' log p, in nats; unknown pieces are scored as by a model."""
    return math.fsum(with_unknown_pieces(log_probs[line.tokens[1:-1]].tolist(), line, len(log_probs)))


def model_scores(
    loaded: LoadedCheckpoint,
    pairs: Sequence[MinimalPair],
    sentences: Sequence[tuple[EncodedLine, EncodedLine]],
    tokens_per_batch: int,
) -> list[tuple[float, float]]:
    """Return the scores of the good and the bad sentence of each pair; ``pairs``: all that were read, also those left out.

    Sentences that are read alike are scored once. They are sorted, the longest first, so that batches have little padding.
    """
    distinct = {line.reading: line for both in sentences for line in both}
    lines = sorted(distinct.values(), key=lambda line: -len(line.tokens))

    def place(number: int) -> str:
        return pairs[(number - 1) // 2].place

    scored = score_lines(loaded, build_pair_scorer(loaded, tokens_per_batch), lines, place, len(lines))
    scores = {one.line.reading: one.pll for one in scored}
    return [(scores[good.reading], scores[bad.reading]) for good, bad in sentences]


def score_pairs(
    loaded: LoadedCheckpoint,
    files: Sequence[Path],
    tokens_per_batch: int,
    out: Path | None = None,
    corpus: str | None = None,
    with_random: bool = False,
) -> Table:
    """Score all pairs with the model and the baselines, return the table of accuracies, and write :func:`save_results` to
    ``out``. ``corpus`` adds the baseline ``unigram``, ``with_random`` the same architecture with random weights."""
    objective = type(loaded.model).__name__.removesuffix("Model").lower()
    definition = DETECTION if isinstance(build_pair_scorer(loaded, tokens_per_batch), DetectionScorer) else PLL
    log_probs = None if corpus is None else unigram_log_probs(loaded, corpus)
    pairs, records = read_pairs(files)
    readable, sentences = encode_pairs(loaded, pairs)
    columns = [Column(objective, definition, model_scores(loaded, pairs, sentences, tokens_per_batch))]
    if log_probs is not None:
        meaning = f"sum of log p(piece), its share of {corpus}, each count plus one"
        scores = [(unigram_score(log_probs, good), unigram_score(log_probs, bad)) for good, bad in sentences]
        columns.append(Column(UNIGRAM, meaning, scores))
    if with_random:
        model = random_weights(loaded.model, RANDOM_SEED).to(loaded.model.never_sampled_mask.device)
        scores = model_scores(dataclasses.replace(loaded, model=model), pairs, sentences, tokens_per_batch)
        columns.append(Column(RANDOM, definition, scores))
    num_too_long = len(pairs) - len(readable)
    table = results_table(loaded, readable, num_too_long, columns)
    if out is not None:
        checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
        setup = {
            "checkpoint": checkpoint | {"objective": objective, "num_updates": loaded.num_updates},
            "tokenizer_sha256": loaded.tokenizer.sha256,
            "score": {column.name: column.definition for column in columns},
            "random_weights_seed": RANDOM_SEED if with_random else None,
            "files": records,
            "max_tokens": loaded.model.max_positions(),
            "too_long": num_too_long,
        }
        save_results(out, setup, readable, columns, table)
    return table


def groups_of(pairs: Sequence[MinimalPair]) -> Iterator[tuple[str, str | None, list[int]]]:
    """Yield term, UID and the indices of its pairs, as they first occur; after the UIDs of a term all of it, with UID None."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.term, {}).setdefault(pair.uid, []).append(index)
    for term, uids in groups.items():
        yield from ((term, uid, members) for uid, members in uids.items())
        yield term, None, [index for members in uids.values() for index in members]


def results_table(
    loaded: LoadedCheckpoint, pairs: Sequence[MinimalPair], num_too_long: int, columns: Sequence[Column]
) -> Table:
    """Return accuracies in percent: the UIDs of a term and then all of the term, all pairs, and the interval of these."""

    def row(name: str, members: Sequence[int]) -> list[str]:
        return [name, f"{len(members)}", *(format_score(column.accuracy(members).percent) for column in columns)]

    rows = [
        row(f"all of {term}" if uid is None else uid, members)
        for term, uid, members in groups_of(pairs)
        if uid is not None or term != NO_TERM
    ]
    everything = range(len(pairs))
    rows.append(row("all pairs", everything))
    limits = [column.accuracy(everything).interval() for column in columns]
    rows.append(["95 % interval", "", *(f"{low:.1f} to {high:.1f}" for low, high in limits)])
    (run,) = distinct_names([loaded.file.resolve().parent])
    title = f"Minimal pairs: {run} ({columns[0].name}) after {loaded.num_updates:,} updates, accuracy in %"
    names = [column.name for column in columns]
    return Table(title, ["UID", "pairs", *names], rows, list(table_notes(loaded, len(pairs), num_too_long, columns)))


def table_notes(
    loaded: LoadedCheckpoint, num_pairs: int, num_too_long: int, columns: Sequence[Column]
) -> Iterator[str]:
    """Yield what a reader of the accuracies must know."""
    names = [column.name for column in columns]
    yield "a pair is right if the good sentence has the higher score, and one half if both scores are equal; chance is 50"
    yield from (f"{column.name}: {column.definition}" for column in columns if column.name != RANDOM)
    if RANDOM in names:
        yield f"{RANDOM}: the same architecture and score, newly initialized with seed {RANDOM_SEED}"
    if UNIGRAM not in names:
        yield f"no column {UNIGRAM}: the tokenizer's {DICTIONARY_FILE} has no counts; give the pretraining corpus with --corpus"
    ties = ", ".join(f"{column.name} {column.accuracy(range(num_pairs)).ties:,}" for column in columns)
    yield f"equal scores, of {num_pairs:,} pairs: {ties}"
    yield "95 % interval: Wilson's, as if the pairs were independent"
    if num_too_long:
        yield f"pairs left out because a sentence is longer than the model's limit: {num_too_long:,}"


def save_results(
    out: Path, setup: dict[str, Any], pairs: Sequence[MinimalPair], columns: Sequence[Column], table: Table
) -> None:
    """Write the results beside ``out``, NAME.json, each file atomically.

    NAME.md, NAME.csv: the table. NAME.pairs.csv: the scores of each pair. NAME.json::

        {"format": 1, "setup": {...}, "notes": [...], "overall": GROUP,
         "terms": [{"term": ..., GROUP}, ...], "uids": [{"term": ..., "uid": ..., GROUP}, ...]}

    GROUP is ``"pairs": n, "scores": {COLUMN: {"accuracy": percent, "ties": n}}``; the overall one also has ``interval``.
    """

    def group(members: Sequence[int]) -> dict[str, Any]:
        results = {column.name: column.accuracy(members) for column in columns}
        scores = {name: {"accuracy": round(one.percent, 4), "ties": one.ties} for name, one in results.items()}
        return {"pairs": len(members), "scores": scores}

    everything = range(len(pairs))
    content = {"format": FORMAT, "setup": setup, "notes": list(table.notes), "overall": group(everything)}
    for column in columns:
        interval = [round(limit, 4) for limit in column.accuracy(everything).interval()]
        content["overall"]["scores"][column.name]["interval"] = interval
    content |= {"terms": [], "uids": []}
    for term, uid, members in groups_of(pairs):
        if uid is None:
            content["terms"].append({"term": term, **group(members)})
        else:
            content["uids"].append({"term": term, "uid": uid, **group(members)})
    lines = [["file", "line", "linguistics_term", "UID"]]
    lines[0] += [f"{column.name}, {side}" for column in columns for side in ("good", "bad")]
    for index, pair in enumerate(pairs):
        scores = [f"{score:.{DECIMALS}f}" for column in columns for score in column.scores[index]]
        lines.append([str(pair.file), pair.line, pair.term, pair.uid, *scores])
    with explain_os_errors(f"{out} cannot be written", ": free some space, or give another --out"):
        write_text(out.with_suffix(PAIR_SUFFIXES[-1]), csv_text(lines))
        table.save(out)
        write_text(out, json_text(content))
