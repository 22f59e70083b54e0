"""What the data sets of texts, SQuAD and sequence tagging share: the order of an epoch, and padded batches of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset

from amos_fairseq.data.seeding import EpochOrder


class LabeledSequences(EpochOrder, FairseqDataset):
    """The sequences of a split; a subclass makes the items, which have at least ``id`` and ``tokens``.

    Args:
        directory: that of the binarized files.
        dictionary: of the special tokens.
        seed: of the training order.
        training: shuffle.

    Attributes:
        sizes: number of tokens of each item.
    """

    sizes: np.ndarray

    def __init__(self, directory: Path, split: str, dictionary: Dictionary, seed: int, training: bool) -> None:
        super().__init__()
        self.directory, self.source = directory, f"{directory}/{split}"
        self.seed, self.training, self.epoch = seed, training, 1
        self.bos, self.pad, self.eos = dictionary.bos(), dictionary.pad(), dictionary.eos()

    def __len__(self) -> int:
        return len(self.sizes)

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch padded to its longest sequence; ``{}`` for an empty list (a rank without data).

        Returns:
            ``id`` LongTensor [B]; ``nsentences``, ``ntokens`` (real tokens) and ``first_id`` Python ints; ``net_input``
            with ``src_tokens`` LongTensor [B,T] and ``lengths``, B Python ints; and what a subclass adds.
        """
        if not samples:
            return {}
        lengths = [len(sample["tokens"]) for sample in samples]
        tokens = torch.full((len(samples), max(lengths)), self.pad, dtype=torch.long)
        for row, sample in enumerate(samples):
            tokens[row, : lengths[row]] = sample["tokens"]
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.long),
            "nsentences": len(samples),
            "ntokens": sum(lengths),
            "first_id": samples[0]["id"],
            "net_input": {"src_tokens": tokens, "lengths": lengths},
        }
        self.add_labels(batch, samples)
        return batch

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        raise NotImplementedError

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens
