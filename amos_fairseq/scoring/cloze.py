"""log p(x_t | all other tokens) of every token of a text, from each objective that defines it (thesis section 5.4.5).

Shapes: L tokens of a sequence, R sequences that go through the model at once, T tokens of the longest of them.
"""

import abc
from collections.abc import Callable, Iterator, Sequence

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.data.length_batches import batches_by_length
from amos_fairseq.special_tokens import MASK_SYMBOL

# Tokens [R,T] int64 -> a number for each [R,T] float32.
ReadAll = Callable[[Tensor], Tensor]
# Tokens [R,T], the same with one of each sequence masked [R,T], its position [R,1] -> a number for it [R] float32.
ReadMasked = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cloze(abc.ABC):
    """A model that scores tokens in their context; in eval mode on one device, in float32.

    Args:
        pretrained: its model, dictionary and settings.
        tokens_per_batch: through the model at once, padding included.
    """

    def __init__(self, pretrained: Pretrained, tokens_per_batch: int):
        self.model: BaseFairseqModel = pretrained.model
        self.pad: int = pretrained.dictionary.pad()
        self.mask: int = pretrained.dictionary.index(MASK_SYMBOL)
        self.tokens_per_batch = tokens_per_batch
        self.device = self.model.unsampled_rows.device
        self._special = self.model.unsampled_rows.cpu()

    @abc.abstractmethod
    def num_passes(self, tokens: Tensor) -> int:
        """How often the model reads a sequence [L] to score it."""

    @abc.abstractmethod
    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Sequences [L] int64 -> [L] float32 each, in nats; 0 at special tokens."""

    def scored(self, tokens: Tensor) -> Tensor:
        """[L] bool: tokens that are no special ones; these alone have a score."""
        return ~self._special[tokens]

    @torch.no_grad()
    def in_one_pass(self, sequences: Sequence[Tensor], read: ReadAll) -> list[Tensor]:
        """``read`` of every token: [L] float32 each, 0 at special tokens."""
        found: list[Tensor] = [torch.empty(0)] * len(sequences)
        for batch in self._batches([len(tokens) for tokens in sequences]):
            values = read(self._padded([sequences[index] for index in batch])).cpu()
            for row, index in enumerate(batch):
                found[index] = values[row, : len(sequences[index])].where(self.scored(sequences[index]), 0.0)
        return found

    @torch.no_grad()
    def with_each_masked(self, sequences: Sequence[Tensor], read: ReadMasked) -> list[Tensor]:
        """``read`` of every token while it alone is masked: [L] float32 each, 0 at special tokens."""
        found = [torch.zeros(len(tokens)) for tokens in sequences]
        places = [
            (index, position)
            for index, tokens in enumerate(sequences)
            for position in self.scored(tokens).nonzero().flatten().tolist()
        ]
        for batch in self._batches([len(sequences[index]) for index, _ in places]):
            tokens = self._padded([sequences[places[number][0]] for number in batch])
            positions = torch.tensor([[places[number][1]] for number in batch], device=self.device)
            values = read(tokens, tokens.scatter(1, positions, self.mask), positions).cpu()
            for number, value in zip(batch, values, strict=True):
                index, position = places[number]
                found[index][position] = value
        return found

    def _padded(self, sequences: Sequence[Tensor]) -> Tensor:
        """[R,T] on the model's device."""
        return pad_sequence(list(sequences), batch_first=True, padding_value=self.pad).to(self.device)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return batches_by_length(lengths, self.tokens_per_batch)


class OnePassCloze(Cloze):
    """Models that score all tokens at once by their own ``token_log_probs``: Electric, ELECTRA-TT, TwoTower."""

    def num_passes(self, tokens: Tensor) -> int:
        return 1

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.in_one_pass(sequences, self.model.token_log_probs)


class MaskedCloze(Cloze):
    """Masked language models: a sequence with n pieces is read n times, each time with another one masked.

    The softmax is that of training: it runs over special tokens and padding rows too.
    """

    def num_passes(self, tokens: Tensor) -> int:
        return int(self.scored(tokens).sum())

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.with_each_masked(sequences, self.read)

    def read(self, tokens: Tensor, masked_tokens: Tensor, positions: Tensor) -> Tensor:
        output = self.model(tokens, masked_tokens, positions, torch.ones_like(positions, dtype=torch.float32))
        return -output.mlm_nll[:, 0]
