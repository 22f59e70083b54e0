"""The two jobs of ``amos score``: scoring every line of a file, and re-ranking n-best lists."""

import contextlib
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.fingerprint import file_sha256
from amos_fairseq.scoring.output import FORMATS, RowFormat, UnfinishedRows, write_whole
from amos_fairseq.scoring.pseudo_likelihood import LineScorer, ScoredLine, num_lines, read_texts
from amos_fairseq.scoring.reranking import (
    NUM_MARKS,
    TextScore,
    Utterance,
    choose_lambda,
    error_rates,
    read_nbest,
    winners,
)
from amos_fairseq.strangers import finite_number, parse_json, whole_number

STDIN = "-"


@contextlib.contextmanager
def stored_input(file: str) -> Iterator[Path]:
    """Yield the path of a text that can be read several times: that of ``file``, or of a copy of a stream.

    ``-`` is the standard input. Rows are counted, and identified for a continuation, before they are scored.
    """
    path = Path(file)
    is_stream = file == STDIN or (path.exists() and not path.is_file() and not path.is_dir())
    if not is_stream:
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "stdin"
        with (
            explain_os_errors(f"the input {file} cannot be copied to {directory}"),
            copy.open("wb") as target,
            contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else path.open("rb") as source,
        ):
            shutil.copyfileobj(source, target)
        yield copy


def score_file(scorer: LineScorer, file: Path, format_: str, out: Path | None) -> None:
    """Write a row for each line of ``file``, in its order; without ``out``, print the rows as they are computed.

    Raises:
        UserError: the text cannot be read, or the rows cannot be written.
    """
    header, row = FORMATS[format_]
    total = num_lines(file)
    notices = Notices(scorer, row)
    if out is None:
        if header is not None:
            print(header)
        for rows in scored_rows(scorer, read_texts(file), notices.row, total):
            print("\n".join(rows), flush=True)
    else:
        with UnfinishedRows(out, identity(scorer, [file], format_)) as unfinished:
            rows = resumed_rows(scorer, read_texts(file), notices.row, total, unfinished)
            write_whole(out, itertools.chain([] if header is None else [header], rows))
            unfinished.remove()
    notices.show()


def rerank(scorer: LineScorer, nbest: Path, dev: Path | None, weight: float | None, out: Path | None) -> None:
    """Write the winners and the word error rates as JSON; lambda is ``weight``, or the best one on ``dev``.

    Raises:
        UserError: a file has an invalid format.
    """
    utterances = read_nbest(nbest)
    dev_utterances = read_nbest(dev) if dev is not None else []
    # Each distinct hypothesis once: the lists of one utterance share many, and dev may repeat them.
    texts = list(dict.fromkeys(h.text for utterance in utterances + dev_utterances for h in utterance.hypotheses))

    def result(scored: Iterable[TextScore]) -> str:
        scores = dict(zip(texts, scored, strict=True))
        name_too_long(scorer, {nbest: utterances} | ({} if dev is None else {dev: dev_utterances}), scores)
        return reranking_result(scores, utterances, dev_utterances, weight)

    if out is None:
        rows = itertools.chain.from_iterable(scored_rows(scorer, texts, text_score_row, len(texts)))
        print(result(map(read_text_score, rows)))
        return
    sources = [nbest] if dev is None else [nbest, dev]
    with UnfinishedRows(out, identity(scorer, sources, "text score")) as unfinished:
        rows = resumed_rows(scorer, texts, text_score_row, len(texts), unfinished)
        try:
            scored = [read_text_score(row) for row in rows]
        except ValueError as error:
            raise unfinished.damaged() from error
        write_whole(out, [result(scored)])
        unfinished.remove()


def text_score_row(scored: ScoredLine) -> str:
    return json.dumps(TextScore(scored.pll, len(scored.line.tokens)))


def read_text_score(row: str) -> TextScore:
    """Read what :func:`text_score_row` wrote; raise ``ValueError`` if it is damaged."""
    pll, num_tokens = parse_json(row, list)
    return TextScore(None if pll is None else finite_number(pll), whole_number(num_tokens, NUM_MARKS))


def name_too_long(scorer: LineScorer, lists: Mapping[Path, list[Utterance]], scores: Mapping[str, TextScore]) -> None:
    """Print the utterance and the place of each hypothesis that is skipped because it is too long for the model."""
    for path, utterances in lists.items():
        for utterance in utterances:
            for place, hypothesis in enumerate(utterance.hypotheses, start=1):
                score = scores[hypothesis.text]
                if score.pll is None:
                    print(
                        f"{path}: hypothesis {place} of {utterance.id!r} is skipped: it has {score.num_tokens} tokens, more "
                        f"than the model's limit of {scorer.max_tokens}",
                        file=sys.stderr,
                    )


def reranking_result(
    scores: Mapping[str, TextScore], utterances: list[Utterance], dev: list[Utterance], weight: float | None
) -> str:
    """Return the JSON output: lambda and how it was chosen, error rates, winners."""
    chosen: dict[str, object] = {}
    if weight is None:
        weight, rates = choose_lambda(dev, scores)
        chosen["dev"] = {**error_rates(dev, scores, weight), "wer_of_lambda": rates}
    content = {
        "lambda": weight,
        **chosen,
        "nbest": error_rates(utterances, scores, weight),
        "reranked": winners(utterances, scores, weight),
    }
    return json.dumps(content, ensure_ascii=False, indent=2)


class Notices:
    """What of the lines in rows is unusual, printed after the last one."""

    def __init__(self, scorer: LineScorer, row: RowFormat) -> None:
        self.max_tokens, self._format = scorer.max_tokens, row
        self.num_too_long = self.first_too_long = self.num_unknown = 0

    def row(self, scored: ScoredLine) -> str:
        self.num_unknown += len(scored.line.unknown)
        if scored.pll is None:
            self.first_too_long = self.first_too_long or scored.line.number
            self.num_too_long += 1
        return self._format(scored)

    def show(self) -> None:
        if self.num_too_long:
            print(
                f"lines without a score, longer than the model's limit of {self.max_tokens} tokens: {self.num_too_long}, "
                f"the first is line {self.first_too_long}",
                file=sys.stderr,
            )
        if self.num_unknown:
            print(f"pieces unknown to the vocabulary, scored as random characters: {self.num_unknown}", file=sys.stderr)


def scored_rows(
    scorer: LineScorer, texts: Iterable[str], row: RowFormat, num_texts: int, first: int = 1
) -> Iterator[list[str]]:
    """Yield the rows of one window of texts at a time, with a progress bar in a terminal.

    ``texts`` start with number ``first`` of ``num_texts``.
    """
    with tqdm(total=num_texts, initial=first - 1, desc="score", unit=" lines", disable=None, file=sys.stderr) as bar:
        for window in scorer.score_windows(texts, first):
            yield [row(scored) for scored in window]
            bar.update(len(window))


def resumed_rows(
    scorer: LineScorer, texts: Iterable[str], row: RowFormat, num_texts: int, unfinished: UnfinishedRows
) -> Iterator[str]:
    """Score the texts that earlier runs have not scored; return all rows."""
    if unfinished.discarded_others:
        print(f"{unfinished.path} was of another text, checkpoint or format: starting from line 1", file=sys.stderr)
    elif unfinished.num_rows > num_texts:
        raise unfinished.damaged()
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
