"""The two jobs of ``amos score``: scoring every line of a file, and re-ranking n-best lists."""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.scoring.output import FORMATS, Row, UnfinishedRows, write_whole
from amos_fairseq.scoring.pseudo_likelihood import LineScorer, ScoredLine, num_lines, read_texts
from amos_fairseq.scoring.reranking import Utterance, choose_lambda, error_rates, read_nbest, winners


def score_file(scorer: LineScorer, file: Path, format_: str, out: Path | None) -> None:
    """Write a row for each line of ``file``, in its order; without ``out``, print the rows as they are computed.

    Raises:
        UserError: the text cannot be read, or the rows cannot be written.
    """
    header, row = FORMATS[format_]
    total = num_lines(file)
    if out is None:
        if header is not None:
            print(header)
        for rows in scored_rows(scorer, read_texts(file), row, total):
            print("\n".join(rows), flush=True)
        return
    with UnfinishedRows(out, identity(scorer, [file], format_)) as unfinished:
        rows = resumed_rows(scorer, read_texts(file), row, total, unfinished)
        write_whole(out, itertools.chain([] if header is None else [header], rows))
        unfinished.remove()


def rerank(scorer: LineScorer, nbest: Path, dev: Path | None, weight: float | None, out: Path | None) -> None:
    """Write the winners and the word error rates as JSON; lambda is ``weight``, or the best one on ``dev``.

    Raises:
        UserError: a file has an invalid format, or a hypothesis is longer than the model's limit.
    """
    utterances = read_nbest(nbest)
    dev_utterances = read_nbest(dev) if dev is not None else []
    # Each distinct hypothesis once: the lists of one utterance share many, and dev may repeat them.
    texts = list(dict.fromkeys(h.text for utterance in utterances + dev_utterances for h in utterance.hypotheses))
    if out is None:
        rows = list(itertools.chain(*scored_rows(scorer, texts, pll_row, len(texts))))
        print(reranking_result(texts, rows, utterances, dev_utterances, weight))
        return
    sources = [nbest] if dev is None else [nbest, dev]
    with UnfinishedRows(out, identity(scorer, sources, "pll")) as unfinished:
        rows = list(resumed_rows(scorer, texts, pll_row, len(texts), unfinished))
        write_whole(out, [reranking_result(texts, rows, utterances, dev_utterances, weight)])
        unfinished.remove()


def pll_row(scored: ScoredLine) -> str:
    if scored.pll is None:
        raise UserError(
            f"the hypothesis {scored.line.text[:60]!r}... has {len(scored.line.tokens)} tokens, more than the model's "
            "limit: remove it from the n-best lists"
        )
    return json.dumps(scored.pll)


def reranking_result(
    texts: list[str], rows: list[str], utterances: list[Utterance], dev: list[Utterance], weight: float | None
) -> str:
    """Return the JSON output: lambda and how it was chosen, error rates, winners."""
    plls = dict(zip(texts, map(json.loads, rows), strict=True))
    chosen: dict[str, object] = {}
    if weight is None:
        weight, rates = choose_lambda(dev, plls)
        chosen["dev"] = {**error_rates(dev, plls, weight), "wer_of_lambda": rates}
    content = {
        "lambda": weight,
        **chosen,
        "nbest": error_rates(utterances, plls, weight),
        "reranked": winners(utterances, plls, weight),
    }
    return json.dumps(content, ensure_ascii=False, indent=2)


def scored_rows(
    scorer: LineScorer, texts: Iterable[str], row: Row, num_texts: int, first: int = 1
) -> Iterator[list[str]]:
    """Yield the rows of one window of texts at a time, with a progress bar in a terminal and notices at the end.

    ``texts`` start with number ``first`` of ``num_texts``.
    """
    num_too_long = first_too_long = num_unknown = 0
    with tqdm(total=num_texts, initial=first - 1, desc="score", unit=" lines", disable=None, file=sys.stderr) as bar:
        for window in scorer.score_windows(texts, first):
            for scored in window:
                num_unknown += scored.num_unknown
                if scored.pll is None:
                    first_too_long = first_too_long or scored.line.number
                    num_too_long += 1
            yield [row(scored) for scored in window]
            bar.update(len(window))
    if num_too_long:
        print(
            f"lines without a score, longer than the model's limit of {scorer.max_tokens} tokens: {num_too_long}, "
            f"the first is line {first_too_long}", file=sys.stderr,
        )  # fmt: skip
    if num_unknown:
        print(f"pieces without a score, unknown to the vocabulary: {num_unknown}", file=sys.stderr)


def resumed_rows(
    scorer: LineScorer, texts: Iterable[str], row: Row, num_texts: int, unfinished: UnfinishedRows
) -> Iterator[str]:
    """Score the texts that earlier runs have not scored; return all rows."""
    if unfinished.discarded_others:
        print(f"{unfinished.path} was of another text, checkpoint or format: starting from line 1", file=sys.stderr)
    elif unfinished.num_rows:
        print(f"{unfinished.path}: {unfinished.num_rows} of {num_texts} lines are already scored", file=sys.stderr)
    rest = itertools.islice(texts, unfinished.num_rows, None)
    for rows in scored_rows(scorer, rest, row, num_texts, unfinished.num_rows + 1):
        unfinished.append(rows)
    return unfinished.rows()


def identity(scorer: LineScorer, sources: Sequence[Path], row: str) -> dict[str, object]:
    """Return everything that determines the rows, except device and batch, which change digits after the sixth.

    Raises:
        UserError: a source cannot be read.
    """
    try:
        texts = [file_sha256(source) for source in sources]
    except OSError as error:
        raise UserError(f"{error.filename}: the text cannot be read ({error.strerror})") from error
    return {
        "checkpoint": file_sha256(scorer.loaded.file),
        "tokenizer": scorer.loaded.tokenizer.sha256,
        "texts": texts,
        "row": row,
        "electra_formula": scorer.electra_formula,
    }
