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
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import DICTIONARY_FILE, csv_text, file_sha256, json_text, write_text
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.output.tables import Table, format_score
from amos_fairseq.probing.features import random_weights
from amos_fairseq.scoring.lines import DECIMALS, EncodedLine, LineScorer, encoded_lines, with_unknown_pieces
from amos_fairseq.scoring.token_scorers import DetectionScorer, build_pair_scorer
from amos_fairseq.strangers import field, parse_json, plain_name
from amos_fairseq.text.input_files import COMPRESSIONS, kind_and_compression, read_lines, refuse_many_brackets
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, read_dictionary_symbols

FORMAT = 1
NO_TERM = "-"
LONGEST_SENTENCE = 1_000_000  # characters
RANDOM_SEED = 1
UNIGRAM, RANDOM = "unigram", "random weights"
OBJECTIVES = {
    MlmModel: "mlm",
    ElectricModel: "electric",
    ElectraModel: "electra",
    TeamsModel: "teams",
    AmosModel: "amos",
}
PLL = "sum of log p(piece | all others), the pseudo-log-likelihood, in nats"
DETECTION = "sum of log P(original) by the discriminator, in nats: no probability of a sentence, but an order"
HINT = 'each line must be an object with the strings "sentence_good" and "sentence_bad"'
CSV_HEADER = ("file", "line", "linguistics_term", "UID")


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences, of which the first is grammatical, and where they come from. ``line`` counts from 1."""

    file: Path
    line: int
    uid: str
    term: str
    good: str
    bad: str

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class Column:
    """Scores of all pairs by one model.

    Attributes:
        definition: what the score is.
        scores: (good, bad) of each pair; larger is better.
    """

    name: str
    definition: str
    scores: list[tuple[float, float]]

    def result(self, members: Sequence[int]) -> "Accuracy":
        """Return the accuracy on the pairs with these indices."""
        pairs = [self.scores[index] for index in members]
        right = sum(good > bad for good, bad in pairs)
        return Accuracy(len(pairs), right, ties=sum(good == bad for good, bad in pairs))


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

    def as_dict(self) -> dict[str, Any]:
        return {"accuracy": round(self.percent, 4), "ties": self.ties}


def read_pairs(paths: Sequence[Path]) -> tuple[list[MinimalPair], list[dict[str, Any]]]:
    """Read all pairs of JSON lines, which may be compressed, and return them with a record of each file.

    A record has the path, the sha256 of the file as it is on disk, and the number of its pairs.

    Raises:
        UserError: a file is missing, given twice or unreadable, a line is something else, or there is no pair.
    """
    pairs: list[MinimalPair] = []
    records = []
    if twice := [path for path, number in Counter(map(os.path.realpath, paths)).items() if number > 1]:
        raise UserError(f"--pairs names {twice[0]} twice, and its pairs would count twice: give each file once")
    for path in paths:
        own, sha256 = _pairs_of(path)
        pairs += own
        records.append({"file": str(path), "sha256": sha256, "pairs": len(own)})
    return pairs, records


def _pairs_of(path: Path) -> tuple[list[MinimalPair], str]:
    pairs, default = [], default_uid(path)
    with explain_os_errors(f"{path}: the pairs cannot be read", ": give files of JSON lines with --pairs"):
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise UserError(f"{path} is a folder or a pipe, not a file: give files of JSON lines with --pairs")
        for number, line in read_lines(path):
            if not line.strip():
                continue
            refuse_many_brackets(line, path, number)
            try:
                pairs.append(parse_pair(line, path, number, default))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}; {HINT}") from error
    if not pairs:
        raise UserError(f"{path} has no pairs: {HINT}")
    return pairs, file_sha256(path)


def default_uid(path: Path) -> str:
    """Return the file's name without the suffixes of JSON lines and of a compression."""
    kind, compression = kind_and_compression(path)
    name = path.name[: len(path.name) - len(compression)] if compression in COMPRESSIONS else path.name
    return name[: len(name) - len(kind)] or name


def parse_pair(line: bytes, path: Path, number: int, default: str) -> MinimalPair:
    """Return the pair of a line of JSON; fields other than the four are ignored.

    Args:
        default: UID of a pair without one.

    Raises:
        ValueError: it is no such object; the reason.
    """
    try:
        content = parse_json(line)
    except ValueError as error:
        raise ValueError(f"the line {error}") from error
    sentences = [_sentence(content, name) for name in ("sentence_good", "sentence_bad")]
    names = [
        _name({name: absent} | content, name) for name, absent in (("UID", default), ("linguistics_term", NO_TERM))
    ]
    return MinimalPair(path, number, *names, *sentences)


def _sentence(content: dict[str, Any], name: str) -> str:
    if name not in content:
        raise ValueError(f"it has no field {name}")
    text = field(content, name, str)
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        return plain_name(text, LONGEST_SENTENCE)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _name(content: dict[str, Any], name: str) -> str:
    try:
        return plain_name(content[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class EncodedPairs:
    """The pairs that the model can read, and their sentences, each distinct sequence of tokens once.

    A tokenizer may read different sentences as the same tokens, for example without case; their scores are equal then, and not
    only up to the rounding of two batches.

    Attributes:
        lines: the distinct sentences.
        owners: for each of ``lines`` a pair that has it.
        members: indices (good, bad) in ``lines`` of each pair.
        num_too_long: pairs that were left out.
    """

    pairs: list[MinimalPair]
    lines: list[EncodedLine]
    owners: list[MinimalPair]
    members: list[tuple[int, int]]
    num_too_long: int

    def column(self, name: str, definition: str, scores: Sequence[float]) -> Column:
        """Return the column of a model that gave each of ``lines`` its score."""
        return Column(name, definition, [(scores[good], scores[bad]) for good, bad in self.members])


def encode_pairs(loaded: LoadedCheckpoint, pairs: Sequence[MinimalPair]) -> EncodedPairs:
    """Encode all sentences as ``amos score`` encodes lines, and leave out pairs with one longer than the model's limit.

    Raises:
        UserError: a sentence has no pieces, or all pairs are too long.
    """
    limit = loaded.model.max_positions()
    encoded = encoded_lines(loaded, (text for pair in pairs for text in (pair.good, pair.bad)))
    readable, members = [], []
    numbers: dict[tuple, int] = {}
    lines: list[EncodedLine] = []
    owners: list[MinimalPair] = []
    for pair in pairs:
        both = (next(encoded), next(encoded))
        for name, line in zip(("sentence_good", "sentence_bad"), both, strict=True):
            if not line.pieces:
                raise UserError(f"{pair.place}: {name} has no character that the tokenizer keeps: write a sentence")
        if max(len(line.tokens) for line in both) > limit:
            continue
        own = []
        for line in both:
            key = (*line.tokens.tolist(), *sorted(line.unknown.items()))
            if key not in numbers:
                numbers[key] = len(lines)
                lines.append(line)
                owners.append(pair)
            own.append(numbers[key])
        readable.append(pair)
        members.append((own[0], own[1]))
    if not readable:
        raise UserError(
            f"every pair has a sentence of more than {limit} tokens, the limit of {loaded.file}: give shorter sentences, "
            "or a model of longer texts"
        )
    return EncodedPairs(readable, lines, owners, members, len(pairs) - len(readable))


def unigram_log_probs(loaded: LoadedCheckpoint, corpus: Path) -> torch.Tensor:
    """Return log p of each token by its share in the training text of a corpus: [dictionary] float64, in nats.

    With c(x) the count of the piece x, N the sum of the counts and V the number of pieces, special tokens left out,

        log p(x) = log((c(x) + 1) / (N + V))

    The counts are those of the binarized text: ``dict.txt`` has a count for each piece, but this package writes 1.

    Raises:
        UserError: there is no such corpus, or it has another dictionary.
    """
    dictionary, symbols = loaded.dictionary, loaded.tokenizer.dictionary_symbols
    if not corpus.is_dir():
        raise UserError(f"--corpus {corpus} is not a directory: give the one that amos prepare wrote")
    paths = []
    for directory in corpus_directories([corpus]):
        require_split(str(directory / "train"))
        if read_dictionary_symbols(directory / DICTIONARY_FILE) != symbols:
            raise UserError(
                f"--corpus {directory} has another dictionary than {loaded.file}: give the corpus of its pretraining"
            )
        paths.append(str(directory / "train"))
    texts = (data_utils.load_indexed_dataset(path, dictionary, combine=True) for path in paths)
    counts = count_tokens(texts, len(dictionary)).double()
    counts[[dictionary.index(symbol) for symbol in SPECIAL_SYMBOLS]] = 0
    return ((counts + 1) / (counts.sum() + len(symbols))).log()


def unigram_scores(log_probs: torch.Tensor, lines: Sequence[EncodedLine]) -> list[float]:
    """Return the sum of the pieces' log p of each sentence, in nats; unknown pieces are scored as by a model."""
    return [
        math.fsum(with_unknown_pieces(log_probs[line.tokens[1:-1]].tolist(), line, len(log_probs))) for line in lines
    ]


def with_random_weights(loaded: LoadedCheckpoint) -> LoadedCheckpoint:
    """Return the same architecture on the same device, initialized as for pretraining."""
    device = loaded.model.never_sampled_mask.device
    return dataclasses.replace(loaded, model=random_weights(loaded.model, RANDOM_SEED).to(device))


def sentence_scores(loaded: LoadedCheckpoint, encoded: EncodedPairs, tokens_per_batch: int) -> list[float]:
    """Return the score of each distinct sentence."""
    scorer = LineScorer(
        loaded,
        build_pair_scorer(loaded, tokens_per_batch),
        place=lambda number: encoded.owners[number - 1].place,
    )
    texts = [line.text for line in encoded.lines]
    return [scored.pll for scored in scorer.score(texts, len(texts))]


def score_pairs(
    loaded: LoadedCheckpoint,
    files: Sequence[Path],
    tokens_per_batch: int,
    out: Path | None = None,
    corpus: Path | None = None,
    with_random: bool = False,
) -> Table:
    """Score all pairs with the model and the baselines, and return the table of accuracies.

    With ``out``, the files of :func:`save_results` are written.

    Args:
        out: NAME.json.
        corpus: adds the baseline ``unigram``: see :func:`unigram_log_probs`.
        with_random: add the same architecture with random weights.

    Raises:
        UserError: the model has no score for pairs, a file is not one of pairs, or the corpus is another one.
    """
    name = OBJECTIVES.get(type(loaded.model), "model")
    definition = DETECTION if isinstance(build_pair_scorer(loaded, tokens_per_batch), DetectionScorer) else PLL
    log_probs = None if corpus is None else unigram_log_probs(loaded, corpus)
    pairs, records = read_pairs(files)
    encoded = encode_pairs(loaded, pairs)
    models = {name: loaded} | ({RANDOM: with_random_weights(loaded)} if with_random else {})
    columns = [
        encoded.column(column, definition, sentence_scores(model, encoded, tokens_per_batch))
        for column, model in models.items()
    ]
    if log_probs is not None:
        meaning = f"sum of log p(piece), its share of {corpus}, each count plus one"
        columns.insert(1, encoded.column(UNIGRAM, meaning, unigram_scores(log_probs, encoded.lines)))
    table = results_table(loaded, encoded, columns)
    if loaded.imported_from and not loaded.num_updates:
        note = (
            "the weights are imported and not trained here: a head that their source lacks is random (see amos import)"
        )
        table = dataclasses.replace(table, notes=[*table.notes, note])
    if out is not None:
        setup = {
            "checkpoint": {
                "file": str(loaded.file),
                "sha256": file_sha256(loaded.file),
                "objective": name,
                "num_updates": loaded.num_updates,
            },
            "tokenizer_sha256": loaded.tokenizer.sha256,
            "score": {column.name: column.definition for column in columns},
            "random_weights_seed": RANDOM_SEED if with_random else None,
            "files": records,
            "max_tokens": loaded.model.max_positions(),
            "too_long": encoded.num_too_long,
        }
        save_results(out, setup, encoded, columns, table)
    return table


def groups_of(pairs: Sequence[MinimalPair]) -> dict[str, dict[str, list[int]]]:
    """Return the indices of the pairs by term and UID, both in the order in which they first occur."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.term, {}).setdefault(pair.uid, []).append(index)
    return groups


def results_table(loaded: LoadedCheckpoint, encoded: EncodedPairs, columns: Sequence[Column]) -> Table:
    """Return accuracies in percent: the UIDs of a term and then all of the term, all pairs, and the interval of these."""

    def row(name: str, members: Sequence[int]) -> list[str]:
        return [name, f"{len(members)}", *(format_score(column.result(members).percent) for column in columns)]

    rows = []
    for term, uids in groups_of(encoded.pairs).items():
        rows += [row(uid, members) for uid, members in uids.items()]
        if term != NO_TERM:
            rows.append(row(f"all of {term}", [index for members in uids.values() for index in members]))
    everything = range(len(encoded.pairs))
    rows.append(row("all pairs", everything))
    limits = [column.result(everything).interval() for column in columns]
    rows.append(["95 % interval", "", *(f"{low:.1f} to {high:.1f}" for low, high in limits)])
    run = loaded.file.resolve().parent.name
    title = f"Minimal pairs: {run} ({columns[0].name}) after {loaded.num_updates:,} updates, accuracy in %"
    return Table(
        title, ["UID", "pairs", *(column.name for column in columns)], rows, list(table_notes(encoded, columns))
    )


def table_notes(encoded: EncodedPairs, columns: Sequence[Column]) -> Iterator[str]:
    """Yield what a reader of the accuracies must know."""
    yield "a pair is right if the good sentence has the higher score, and one half if both scores are equal; chance is 50"
    yield from (f"{column.name}: {column.definition}" for column in columns if column.name != RANDOM)
    if RANDOM in [column.name for column in columns]:
        yield f"{RANDOM}: the same architecture and score, newly initialized with seed {RANDOM_SEED}"
    if UNIGRAM not in [column.name for column in columns]:
        yield f"no column {UNIGRAM}: the tokenizer's {DICTIONARY_FILE} has no counts; give the pretraining corpus with --corpus"
    results = [column.result(range(len(encoded.pairs))) for column in columns]
    ties = ", ".join(f"{column.name} {one.ties:,}" for column, one in zip(columns, results, strict=True))
    yield f"equal scores, of {len(encoded.pairs):,} pairs: {ties}"
    yield "95 % interval: Wilson's, as if the pairs were independent"
    if encoded.num_too_long:
        yield f"pairs left out because a sentence is longer than the model's limit: {encoded.num_too_long:,}"


def save_results(
    out: Path, setup: dict[str, Any], encoded: EncodedPairs, columns: Sequence[Column], table: Table
) -> list[Path]:
    """Write the results beside ``out``, NAME.json, each file atomically; return the paths.

    NAME.md, NAME.csv: the table. NAME.pairs.csv: the scores of each pair. NAME.json::

        {"format": 1, "setup": {...}, "notes": [...], "overall": GROUP,
         "terms": [{"term": ..., GROUP}, ...], "uids": [{"term": ..., "uid": ..., GROUP}, ...]}

    GROUP is ``"pairs": n, "scores": {COLUMN: {"accuracy": percent, "ties": n}}``; the overall one also has ``interval``.

    Raises:
        UserError: a file cannot be written.
    """

    def group(members: Sequence[int]) -> dict[str, Any]:
        return {
            "pairs": len(members),
            "scores": {column.name: column.result(members).as_dict() for column in columns},
        }

    groups, everything = groups_of(encoded.pairs), range(len(encoded.pairs))
    overall = group(everything)
    for column in columns:
        overall["scores"][column.name]["interval"] = [round(x, 4) for x in column.result(everything).interval()]
    content = {
        "format": FORMAT,
        "setup": setup,
        "notes": list(table.notes),
        "overall": overall,
        "terms": [{"term": term, **group([i for own in uids.values() for i in own])} for term, uids in groups.items()],
        "uids": [
            {"term": term, "uid": uid, **group(own)} for term, uids in groups.items() for uid, own in uids.items()
        ],
    }
    header = [*CSV_HEADER, *(f"{column.name}, {side}" for column in columns for side in ("good", "bad"))]
    lines = [
        [
            str(pair.file),
            pair.line,
            pair.term,
            pair.uid,
            *(f"{score:.{DECIMALS}f}" for column in columns for score in column.scores[index]),
        ]
        for index, pair in enumerate(encoded.pairs)
    ]
    table_files = table_paths(out)
    with explain_os_errors(f"{out} cannot be written", ": free some space, or give another --out"):
        write_text(table_files[-1], csv_text([header, *lines]))
        table.save(out)
        write_text(out, json_text(content))
    return [out, *table_files]


def table_paths(out: Path) -> list[Path]:
    """Return the files beside NAME.json: NAME.md, NAME.csv and NAME.pairs.csv."""
    return [out.with_suffix(suffix) for suffix in (".md", ".csv", ".pairs.csv")]
