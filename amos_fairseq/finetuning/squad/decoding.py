"""Prediction of SQuAD's answers: the model scores spans of windows; the best spans of a question become its answers."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.data.squad import SquadWindowDataset, Window, window_of_most_context
from amos_fairseq.errors import UserError

TOKENS_PER_BATCH = 8192
# Null odds of a question without any valid span: above every threshold, and valid JSON.
NO_SPAN_ODDS = 1e9


class DecodingLimits(NamedTuple):
    """BERT's limits: answers of up to ``max_answer_length`` tokens, and the ``n_best`` of them for each question."""

    max_answer_length: int = 30
    n_best: int = 20


class ScoredSpan(NamedTuple):
    """``first`` and ``last`` are token indices of the whole context."""

    score: float
    first: int
    last: int


class ScoredText(NamedTuple):
    text: str
    score: float


class Decoded(NamedTuple):
    """The answers to a question.

    ``texts``: distinct, non-empty answers, best first. ``null_odds``: higher if no answer is more likely.
    """

    texts: list[ScoredText]
    null_odds: float

    @property
    def best(self) -> str:
        return self.texts[0].text if self.texts else ""

    def as_json(self) -> list[dict[str, Any]]:
        """Return the entries of the n-best file: texts, scores, and a softmax over the list as probabilities."""
        highest = max((found.score for found in self.texts), default=0.0)
        weights = [math.exp(found.score - highest) for found in self.texts]
        total = sum(weights)
        return [
            {"text": found.text, "probability": weight / total, "score": found.score}
            for found, weight in zip(self.texts, weights, strict=True)
        ]


def predict(
    model: BaseFairseqModel,
    windows: SquadWindowDataset,
    device: str,
    limits: DecodingLimits,
    report: Callable[[int], object],
) -> dict[str, Decoded]:
    """Predict the answers to every question of a split, by question id, in the order of the split.

    Args:
        model: in eval mode, with a span head.
        report: called with the number of windows of each batch; may raise an exception to stop.

    Raises:
        UserError: the model has no span head, or its input is shorter than a window.
    """
    if getattr(model, "span_head", None) is None:
        raise UserError("the checkpoint has no head for answers: fine-tune it with --task squad first")
    if windows.limits.tokens > model.max_positions():
        raise UserError(f"a window has {windows.limits.tokens} tokens, but the model takes {model.max_positions()}")
    model = model.to(device)
    owners = owner_windows(windows)
    spans: dict[int, list[ScoredSpan]] = defaultdict(list)
    null_scores: dict[int, list[float]] = defaultdict(list)
    for batch in batches_by_length(windows.sizes, TOKENS_PER_BATCH):
        net_input = windows.collater([windows[index] for index in batch])["net_input"]
        with torch.inference_mode():
            output = model(net_input["src_tokens"].to(device), answer_mask=net_input["answer_mask"].to(device))
        starts, ends, scores, nulls = (part.cpu().numpy() for part in output.candidates)
        for row, index in enumerate(batch):
            window = windows.window(index)
            found = spans_of_window(starts[row], ends[row], scores[row], window, owners[window.example], limits)
            spans[window.example] += found
            null_scores[window.example].append(float(nulls[row]))
        report(len(batch))
    squad, compares_null = windows.squad, model.span_head.kind == "independent"
    return {
        example.id: decode_question(
            spans[index], null_scores[index], squad.texts[example.context], squad.offsets(example.context),
            compares_null, limits,
        )
        for index, example in enumerate(squad.examples)
    }  # fmt: skip


def owner_windows(windows: SquadWindowDataset) -> dict[int, np.ndarray]:
    """Return for each example the index of the window in which every context token has most context: [tokens] int64."""
    ranges = defaultdict(list)
    for index in range(len(windows)):
        window = windows.window(index)
        ranges[window.example].append((window.begin, window.end))
    return {example: window_of_most_context(found) for example, found in ranges.items()}


def spans_of_window(
    starts: np.ndarray, ends: np.ndarray, scores: np.ndarray, window: Window, owner: np.ndarray, limits: DecodingLimits
) -> list[ScoredSpan]:
    """Return the valid spans of a window, best first, at most ``n_best``.

    A valid span is inside the context, does not end before it starts, and is not too long. It counts only in the window in
    which its first token has most context, so that no span is scored twice.

    Args:
        starts, ends: [C] token positions in the window.
        scores: [C], -inf for spans that the head excludes.
        owner: [context tokens] index of the window in which each token has most context (``window_of_most_context``).
    """
    first, last = starts - window.offset + window.begin, ends - window.offset + window.begin
    valid = np.isfinite(scores) & (first >= window.begin) & (last < window.end)
    valid &= (last >= first) & (last - first < limits.max_answer_length)
    candidates = np.flatnonzero(valid)
    candidates = candidates[owner[first[candidates]] == window.number]
    best = candidates[np.argsort(-scores[candidates], kind="stable")][: limits.n_best]
    return [ScoredSpan(float(scores[i]), int(first[i]), int(last[i])) for i in best]


def decode_question(
    spans: Iterable[ScoredSpan],
    null_scores: Sequence[float],
    context: str,
    characters: tuple[np.ndarray, np.ndarray],
    compares_null: bool,
    limits: DecodingLimits,
) -> Decoded:
    """Select the answers to one question from the spans of all its windows.

    Args:
        null_scores: one per window; the lowest counts, since one window with an answer is enough.
        context: the original text of the paragraph.
        characters: begin and end (exclusive) of each context token in ``context``.
        compares_null: whether null scores have the scale of span scores (independent head). The odds are then their
            difference to the best span's score; otherwise (joint head) the null score itself.
    """
    texts: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: -span.score):
        text = context[characters[0][span.first] : characters[1][span.last]].strip()
        if text and text not in texts:
            texts[text] = span.score
            if len(texts) == limits.n_best:
                break
    null_odds = min(null_scores)
    if not texts:
        null_odds = NO_SPAN_ODDS
    elif compares_null:
        null_odds -= next(iter(texts.values()))
    return Decoded([ScoredText(text, score) for text, score in texts.items()], null_odds)
