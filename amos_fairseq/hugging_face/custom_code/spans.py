"""The pipeline ``spans`` of an exported folder: spans of a raw text, as ``amos tag --predict`` finds them.

``aggregation_strategy="first"`` of transformers finds other words: with WordPiece what is between signs, with other tokenizers
what is between spaces.
"""

import itertools
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from transformers.pipelines.base import ChunkPipeline

from amos_fairseq.inputs.raw_words import join_words, ranges_of_words, spaces_between
from amos_fairseq.inputs.schemes import items_of
from amos_fairseq.text.tokenization.word_pieces import merge_windows, pieces_of_words, tidy_spans, windows_of


class SpansPipeline(ChunkPipeline):
    """Return what the pipeline ``token-classification`` returns with an ``aggregation_strategy``; where labels mark no spans,
    an entry for each word. A text that is too long for the model is read in windows."""

    def _sanitize_parameters(self, **_: Any) -> tuple[dict, dict, dict]:
        return {}, {}, {}

    def preprocess(self, text: str) -> Iterator[dict[str, Any]]:
        settings, tokenizer = self.model.config.words, self.tokenizer
        ranges = ranges_of_words(text, settings["signs"], set(settings["whole"]))
        words = [text[start:end] for start, end in ranges]
        spaces: list[bool] | None = [
            start > end for (_, end), (start, _) in itertools.pairwise([*ranges, *ranges[-1:]])
        ]
        if not settings["raw_text"]:  # words in columns have trained
            spaces = spaces_between(words)
        read = join_words(words, spaces)
        encoding = tokenizer(
            read, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        ids, names = encoding["input_ids"], tokenizer.convert_ids_to_tokens(encoding["input_ids"])
        aligned = [(name, *offset) for name, offset in zip(names, encoding["offset_mapping"], strict=True)]
        pieces, absent = pieces_of_words(words, spaces, [span for _, *span in tidy_spans(read, aligned)])
        for index in absent:
            ids.insert(index, tokenizer.unk_token_id)
        # Without words: one window of nothing.
        windows = list(windows_of(pieces, len(ids), tokenizer.model_max_length - 2)) or [(0, 0, 0, 0)]
        for first, last, begin, end in windows:
            window = torch.tensor([[tokenizer.cls_token_id, *ids[begin:end], tokenizer.sep_token_id]])
            places = [start - begin + 1 for start, _ in pieces[first:last]]
            of_text = {"first": first, "places": places, "text": text, "ranges": ranges, "is_last": last == len(pieces)}
            yield {"input_ids": window, "attention_mask": torch.ones_like(window)} | of_text

    def _forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        window = {name: inputs.pop(name) for name in ("input_ids", "attention_mask")}
        return inputs | {"logits": self.model(**window).logits}

    def postprocess(self, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        probabilities = merge_windows(
            (each["first"], each["logits"][0].float().softmax(-1)[each["places"]]) for each in outputs
        )
        names = [self.model.config.id2label[int(each.argmax())] for each in probabilities]
        text, found = outputs[0]["text"], []
        for label, first, last in items_of(names, self.model.config.words["kind"] == "spans"):
            start, end = outputs[0]["ranges"][first][0], outputs[0]["ranges"][last][1]
            score = fmean(float(each.max()) for each in probabilities[first : last + 1])
            found.append({"entity_group": label, "score": score, "word": text[start:end], "start": start, "end": end})
        return found
