"""The two jobs of ``amos score``: every line of a file, and the best hypothesis of every n-best list."""

import itertools
import json
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.scoring.lines import num_lines, read_texts
from amos_fairseq.scoring.nbest import Utterance, read_nbest
from amos_fairseq.scoring.pseudo_likelihood import ScoredLine, Scorer
from amos_fairseq.scoring.reranking import choose_lambda, error_rates, winners
from amos_fairseq.scoring.rows import FORMATS
from amos_fairseq.scoring.session import identity, kept_rows, scored_rows, write_whole
from amos_fairseq.scoring.unfinished import UnfinishedRows


def score_file(scorer: Scorer, file: Path, format_: str, out: Path | None) -> None:
    """A row for each line of ``file``, in its order; printed as they come where there is no ``out``.

    Raises:
        UserError: the text cannot be read, or the rows cannot be written.
    """
    head, row = FORMATS[format_]
    total = num_lines(file)
    if out is None:
        if head is not None:
            print(head)
        for rows in scored_rows(scorer, read_texts(file), row, total):
            print("\n".join(rows), flush=True)
        return
    with UnfinishedRows(out, identity(scorer, [file], format_)) as unfinished:
        rows = kept_rows(scorer, read_texts(file), row, total, unfinished)
        write_whole(out, itertools.chain([] if head is None else [head], rows))
        unfinished.remove()


def rerank(scorer: Scorer, nbest: Path, dev: Path | None, weight: float | None, out: Path | None) -> None:
    """Winners and word error rates as JSON; lambda is ``weight``, or the best on ``dev``.

    Raises:
        UserError: a file has another form, or a hypothesis is longer than the model reads.
    """
    utterances = read_nbest(nbest)
    dev_utterances = read_nbest(dev) if dev is not None else []
    texts = texts_of(utterances + dev_utterances)
    if out is None:
        rows = list(itertools.chain(*scored_rows(scorer, texts, pll_row, len(texts))))
        print(result(texts, rows, utterances, dev_utterances, weight))
        return
    sources = [nbest] if dev is None else [nbest, dev]
    with UnfinishedRows(out, identity(scorer, sources, "pll")) as unfinished:
        rows = list(kept_rows(scorer, texts, pll_row, len(texts), unfinished))
        write_whole(out, [result(texts, rows, utterances, dev_utterances, weight)])
        unfinished.remove()


def texts_of(utterances: list[Utterance]) -> list[str]:
    """Every different hypothesis once: lists of one utterance share many, and those of dev may come again."""
    return list(dict.fromkeys(each.text for utterance in utterances for each in utterance.hypotheses))


def pll_row(scored: ScoredLine) -> str:
    if scored.pll is None:
        raise UserError(
            f"the hypothesis {scored.line.text[:60]!r}... has {len(scored.line.tokens)} tokens, more than the model reads: "
            "take it out of the n-best lists"
        )
    return json.dumps(scored.pll)


def result(
    texts: list[str], rows: list[str], utterances: list[Utterance], dev: list[Utterance], weight: float | None
) -> str:
    """The JSON that is written: the lambda and how it was found, error rates, winners."""
    plls = dict(zip(texts, map(json.loads, rows), strict=True))
    found: dict[str, object] = {}
    if weight is None:
        weight, rates = choose_lambda(dev, plls)
        found["dev"] = {**error_rates(dev, plls, weight), "wer_of_lambda": rates}
    found = {"lambda": weight, **found, "nbest": error_rates(utterances, plls, weight)}
    return json.dumps({**found, "reranked": winners(utterances, plls, weight)}, ensure_ascii=False, indent=2)
