"""A fine-tuned model reads a split: windows in batches, answers out."""

from collections import defaultdict
from typing import Callable, Dict, List

import numpy as np
import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.data.squad import SquadWindowDataset, window_of_most_context
from amos_fairseq.errors import UserError
from amos_fairseq.squad.decoding import Decoded, DecodingLimits, ScoredSpan, decode_question, spans_of_window

TOKENS_PER_BATCH = 8192


def predict(
    model: BaseFairseqModel,
    windows: SquadWindowDataset,
    device: str,
    limits: DecodingLimits,
    report: Callable[[int], object],
) -> Dict[str, Decoded]:
    """Answers to every question of a split, by its id, in the split's order.

    Args:
        model: in eval mode, with a span head.
        report: told the number of windows just read; may raise to stop.

    Raises:
        UserError: the model has no span head, or reads less than a window.
    """
    if getattr(model, "span_head", None) is None:
        raise UserError("the checkpoint has no head for answers: fine-tune it with --task squad first")
    if windows.limits.tokens > model.max_positions():
        raise UserError(f"a window has {windows.limits.tokens} tokens, the model reads {model.max_positions()}")
    model = model.to(device)
    owners = owners_of_tokens(windows)
    spans: Dict[int, List[ScoredSpan]] = defaultdict(list)
    null_scores: Dict[int, List[float]] = defaultdict(list)
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
            spans[number], null_scores[number], squad.texts[example.context], squad.offsets(example.context),
            compares_null, limits,
        )
        for number, example in enumerate(squad.examples)
    }  # fmt: skip


def owners_of_tokens(windows: SquadWindowDataset) -> Dict[int, np.ndarray]:
    """For each example the number of the window in which every context token has most context."""
    ranges = defaultdict(list)
    for index in range(len(windows)):
        window = windows.window(index)
        ranges[window.example].append((window.begin, window.end))
    return {example: window_of_most_context(found) for example, found in ranges.items()}
