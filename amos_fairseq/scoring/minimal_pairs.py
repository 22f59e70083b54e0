"""Minimal pairs: how often a model scores the grammatical one of two sentences higher, without fine-tuning.

A file is a table: the JSON lines of the 67 files of BLiMP (Warstadt et al., 2020), or with the columns sen, wrong_sen and
phenomenon those of MultiBLiMP (Jumelet et al., 2025)::

    {"sentence_good": "These dogs bark.", "sentence_bad": "This dogs bark.", "UID": "...", "linguistics_term": "..."}

A pair counts 1 if the good sentence has the higher score, 1/2 if both scores are equal, else 0. Accuracy is the mean in percent
of each UID, of each term, and of all pairs; chance is 50. Scores are sums over the pieces, not divided by their number, as in
BLiMP and Salazar et al. (2020): the PLL of mlm and electric, and log P(original) of discriminators
(``amos_fairseq.scoring.token_scorers.DetectionScorer``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names, file_sha256, json_text, write_text
from amos_fairseq.inputs.files import print_counts
from amos_fairseq.inputs.rows import is_missing
from amos_fairseq.inputs.tables import TableFile, require_columns
from amos_fairseq.output.terminal import Table, format_score, say
from amos_fairseq.scoring.lines import DECIMALS, EncodedLine, encoded_lines, score_lines
from amos_fairseq.scoring.token_scorers import DetectionScorer, TokenScorer, build_pair_scorer
from amos_fairseq.untrusted import LONGEST_NAME, plain_name

NO_TERM = "-"
LONGEST_SENTENCE = 1_000_000  # characters
PLL = "sum of log p(piece | all others), the pseudo-log-likelihood, in nats"
DETECTION = "sum of log P(original) by the discriminator, in nats: no probability of a sentence, but an order"
# Of the good and the bad sentence, what their difference is, and its group: the names in BLiMP, and in MultiBLiMP.
COLUMNS = (("sentence_good", "sen"), ("sentence_bad", "wrong_sen"), ("UID", "phenomenon"), ("linguistics_term",))
FORM = (
    "a table (.jsonl, .tsv, .csv, .parquet) of the texts sentence_good and sentence_bad, and if you like UID and "
    "linguistics_term, as in BLiMP, or of sen, wrong_sen and phenomenon, as in MultiBLiMP"
)


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences, of which the first is grammatical, and where they come from. ``line`` (or the row) counts from 1."""

    file: Path
    line: int
    good: str
    bad: str
    uid: str
    term: str

    @property
    def place(self) -> str:
        return f"{self.file}, line {self.line}"


Scores = Sequence[tuple[float, float]]  # of the good and the bad sentence of each pair, larger is better


def accuracy_of(scores: Scores) -> dict[str, float]:
    """Return the number of pairs, the accuracy in percent, and the number of pairs with equal scores."""
    right, ties = sum(good > bad for good, bad in scores), sum(good == bad for good, bad in scores)
    return {"pairs": len(scores), "accuracy": round(100 * (right + ties / 2) / len(scores), 4), "ties": ties}


def read_pairs(path: Path) -> list[MinimalPair]:
    """Read the pairs of a table; a pair without a UID has the name of its file."""
    table, pairs = TableFile(path, all_keys=True), []
    columns = [next((name for name in names if name in table.columns), names[0]) for names in COLUMNS]
    require_columns(table, columns[:2], f"give {FORM}")
    for number, row in table.rows([name for name in columns if name in table.columns]):
        default_names = (path.name.partition(".")[0] or path.name, NO_TERM)
        try:
            texts = map(row.get, columns[:2])
            good, bad = ("" if is_missing(text) else plain_name(text, LONGEST_SENTENCE) for text in texts)
            named = zip(map(row.get, columns[2:]), default_names, strict=True)
            uid, term = (plain_name(default if is_missing(name) else name, LONGEST_NAME) for name, default in named)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; give {FORM}") from error
        pairs.append(MinimalPair(path, number, good, bad, uid, term))
    if table.broken_lines:
        print_counts(path, len(pairs), "pairs", table.left_out, "score")
    return pairs


def encode_pairs(
    loaded: LoadedCheckpoint, pairs: Sequence[MinimalPair]
) -> tuple[list[MinimalPair], list[tuple[EncodedLine, EncodedLine]]]:
    """Return the pairs without those with an empty sentence or one longer than the model's limit, and their sentences."""
    limit = loaded.model.max_positions()
    encoded = encoded_lines(loaded, (text for pair in pairs for text in (pair.good, pair.bad)))
    readable, sentences = [], []
    for pair, good, bad in zip(pairs, encoded, encoded, strict=True):  # the lines of a pair follow one another
        if good.pieces and bad.pieces and max(len(good.tokens), len(bad.tokens)) <= limit:
            readable.append(pair)
            sentences.append((good, bad))
    if not readable:
        raise UserError(f"--pairs has no pair of sentences of 3 to {limit} tokens, the limit of the model: give {FORM}")
    return readable, sentences


def scores_of(
    loaded: LoadedCheckpoint,
    scorer: TokenScorer,
    pairs: Sequence[MinimalPair],
    sentences: Sequence[tuple[EncodedLine, EncodedLine]],
) -> Scores:
    """Return the scores of each of ``sentences``; ``pairs``: all that were read, also those left out. Sentences that are read
    alike are scored once, the longest first, so that batches have little padding."""
    distinct = {line.reading: line for both in sentences for line in both}
    lines = sorted(distinct.values(), key=lambda line: -len(line.tokens))
    scored = score_lines(loaded, scorer, lines, lambda number: pairs[(number - 1) // 2].place, len(lines))
    scores = {scored_line.line.reading: scored_line.pll for scored_line in scored}
    return [(scores[good.reading], scores[bad.reading]) for good, bad in sentences]


def score_pairs(loaded: LoadedCheckpoint, files: Sequence[Path], tokens_per_batch: int, out: Path | None) -> Table:
    """Score all pairs, return the table of accuracies, and write ``results_json`` to ``out``."""
    scorer = build_pair_scorer(loaded, tokens_per_batch)
    pairs_of = {file: read_pairs(file) for file in files}
    pairs = [pair for pairs_of_file in pairs_of.values() for pair in pairs_of_file]
    readable, sentences = encode_pairs(loaded, pairs)
    first = readable[0]
    say(
        f"{len(pairs):,} pairs in {len(pairs_of):,} files; the first: {first.good!r:.100} > {first.bad!r:.100}", "score"
    )
    scores = scores_of(loaded, scorer, pairs, sentences)
    num_left_out = len(pairs) - len(readable)
    objective = type(loaded.model).__name__.removesuffix("Model").lower()
    definition = DETECTION if isinstance(scorer, DetectionScorer) else PLL
    (run,) = distinct_names([loaded.file.resolve().parent])
    title = f"Minimal pairs: {run} ({objective}) after {loaded.num_updates:,} updates, accuracy in %"
    notes = [
        "a pair is right if the good sentence has the higher score, and one half if both scores are equal; chance is 50",
        f"score: {definition}",
        f"equal scores, of {len(scores):,} pairs: {accuracy_of(scores)['ties']:,}",
    ]
    if num_left_out:
        notes.append(f"pairs left out because a sentence is empty or longer than the model's limit: {num_left_out:,}")
    table = results_table(title, readable, scores, notes)
    if out is not None:
        checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
        setup = {
            "checkpoint": checkpoint | {"objective": objective, "num_updates": loaded.num_updates},
            "tokenizer_sha256": loaded.tokenizer.sha256,
            "score": definition,
            "files": [{"file": str(file), "sha256": file_sha256(file), "pairs": len(pairs_of[file])} for file in files],
            "max_tokens": loaded.model.max_positions(),
            "left_out": num_left_out,
        }
        write_text(out, json_text(results_json(setup, readable, scores, table)))
    return table


def accuracies_of(pairs: Sequence[MinimalPair], scores: Scores) -> Iterator[tuple[str, str | None, dict[str, float]]]:
    """Yield term, UID and accuracy, as they first occur; after the UIDs of a term all of it, with UID None."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for pair, both in zip(pairs, scores, strict=True):
        groups.setdefault(pair.term, {}).setdefault(pair.uid, []).append(both)
    for term, uids in groups.items():
        yield from ((term, uid, accuracy_of(members)) for uid, members in uids.items())
        yield term, None, accuracy_of([both for members in uids.values() for both in members])


def results_table(title: str, pairs: Sequence[MinimalPair], scores: Scores, notes: list[str]) -> Table:
    """Return accuracies in percent: the UIDs of a term and then all of the term, and all pairs."""

    def row(name: str, group: dict[str, float]) -> list[str]:
        return [name, f"{group['pairs']}", format_score(group["accuracy"])]

    rows = [
        row(f"all of {term}" if uid is None else uid, group)
        for term, uid, group in accuracies_of(pairs, scores)
        if uid is not None or term != NO_TERM
    ]
    return Table(title, ["UID", "pairs", "accuracy"], [*rows, row("all pairs", accuracy_of(scores))], notes)


def results_json(setup: dict[str, Any], pairs: Sequence[MinimalPair], scores: Scores, table: Table) -> dict[str, Any]:
    """Return the content of the file ``--out``::

        {"setup": {...}, "notes": [...], "overall": {GROUP},
         "terms": [{"term": ..., GROUP}, ...], "uids": [{"term": ..., "uid": ..., GROUP}, ...],
         "pairs": [{"file": ..., "line": ..., "good": score, "bad": score}, ...]}

    GROUP is what ``accuracy_of`` returns.
    """
    groups = list(accuracies_of(pairs, scores))
    content = {"setup": setup, "notes": list(table.notes), "overall": accuracy_of(scores)}
    content["terms"] = [{"term": term, **group} for term, uid, group in groups if uid is None]
    content["uids"] = [{"term": term, "uid": uid, **group} for term, uid, group in groups if uid is not None]
    content["pairs"] = [
        {"file": str(pair.file), "line": pair.line, "good": round(good, DECIMALS), "bad": round(bad, DECIMALS)}
        for pair, (good, bad) in zip(pairs, scores, strict=True)
    ]
    return content
