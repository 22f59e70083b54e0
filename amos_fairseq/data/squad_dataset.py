"""Windows of questions and contexts as batches: ``<s> question </s> context </s>``."""

from typing import Any, Dict, List, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset

from amos_fairseq.data.epoch_order import EpochOrder
from amos_fairseq.data.squad_files import SquadSplit
from amos_fairseq.data.squad_windows import SPECIAL_TOKENS, WindowLimits, context_ranges


class Window(NamedTuple):
    """Context tokens [begin, end) beside the question of an example.

    ``number``: the window's place among those of its example. ``offset``: position of context token ``begin`` in the
    window, so that token i of the context stands at ``offset + i - begin``.
    """

    example: int
    number: int
    begin: int
    end: int
    offset: int


class SquadWindowDataset(EpochOrder, FairseqDataset):
    """All windows of a split.

    A window that holds the whole answer is labelled with the positions of its first and last token; every other one, of
    whatever question, with 0 and 0, the position of ``<s>``.

    Args:
        split: the binarized data.
        dictionary: of the special tokens.
        limits: lengths in tokens.
        seed: of the order of training.
        training: shuffle, and leave out questions whose answers could not be aligned to tokens; they would be taught as
            unanswerable. Otherwise every question is there, in order.
    """

    def __init__(
        self, split: SquadSplit, dictionary: Dictionary, *, limits: WindowLimits, seed: int = 0, training: bool = False
    ) -> None:
        super().__init__()
        limits.check()
        self.squad, self.limits, self.seed, self.training = split, limits, seed, training
        self.source = f"{split.directory}/{split.split}"
        self.epoch = 1
        self.bos, self.pad, self.eos = dictionary.bos(), dictionary.pad(), dictionary.eos()
        rows = [window for example in range(len(split)) for window in self._windows_of(example)]
        self._windows = np.array(rows, dtype=np.int64).reshape(-1, len(Window._fields))
        self.sizes = self._windows[:, 4] + self._windows[:, 3] - self._windows[:, 2] + 1

    def _windows_of(self, index: int) -> List[Window]:
        example = self.squad.examples[index]
        if self.training and example.answers and example.target is None:
            return []
        question = min(int(self.squad.questions.sizes[index]), self.limits.question)
        ranges = context_ranges(
            int(self.squad.contexts.sizes[example.context]), self.limits.room(question), self.limits.doc_stride
        )
        return [Window(index, number, *bounds, question + SPECIAL_TOKENS - 1) for number, bounds in enumerate(ranges)]

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, index: int) -> Window:
        return Window(*self._windows[index].tolist())

    def __getitem__(self, index: int) -> Dict[str, Any]:
        """``id`` int, ``tokens`` LongTensor [L], ``context`` (first position, number of tokens), ``target`` (start, end)."""
        index = int(index)
        window = self.window(index)
        example = self.squad.examples[window.example]
        question = self.squad.questions[window.example][: self.limits.question]
        context = self.squad.contexts[example.context][window.begin : window.end]
        tokens = torch.cat(
            [
                torch.tensor([self.bos]),
                question.long(),
                torch.tensor([self.eos]),
                context.long(),
                torch.tensor([self.eos]),
            ]
        )
        return {
            "id": index,
            "tokens": tokens,
            "context": (window.offset, len(context)),
            "target": self._target(window, example.target),
        }

    @staticmethod
    def _target(window: Window, answer: tuple[int, int] | None) -> tuple[int, int]:
        if answer is None or answer[0] < window.begin or answer[1] >= window.end:
            return 0, 0
        shift = window.offset - window.begin
        return answer[0] + shift, answer[1] + shift

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """A batch as wide as its longest window; an empty list (a rank without data) gives ``{}``.

        Returns:
            ``id`` LongTensor [B]; ``nsentences``, ``ntokens`` (real tokens) and ``first_id`` Python ints; ``net_input``
            with ``src_tokens`` LongTensor [B,T], ``src_lengths`` LongTensor [B], ``answer_mask`` BoolTensor [B,T] (True
            at context tokens) and ``span_targets``, two LongTensors [B].
        """
        if not samples:
            return {}
        lengths = [len(sample["tokens"]) for sample in samples]
        tokens = torch.full((len(samples), max(lengths)), self.pad, dtype=torch.long)
        answer_mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, sample in enumerate(samples):
            first, count = sample["context"]
            tokens[row, : lengths[row]] = sample["tokens"]
            answer_mask[row, first : first + count] = True
        starts, ends = torch.tensor([sample["target"] for sample in samples], dtype=torch.long).unbind(1)
        return {
            "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.long),
            "nsentences": len(samples),
            "ntokens": sum(lengths),
            "first_id": samples[0]["id"],
            "net_input": {
                "src_tokens": tokens,
                "src_lengths": torch.tensor(lengths, dtype=torch.long),
                "answer_mask": answer_mask,
                "span_targets": (starts, ends),
            },
        }

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])
