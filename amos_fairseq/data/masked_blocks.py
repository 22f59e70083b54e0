"""Blocks of tokens with masked positions, in static shapes.

A block is ``<s>`` and the next T - 1 tokens of the corpus, across lines and documents (``--sample-break-mode none``, the
default; ``amos_fairseq.data.corpus.read_blocks`` cuts them). The last block of a text may be shorter and is padded.

Shapes: B blocks, T tokens per block, k = ceil(mask_prob * T) slots for masked positions.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset

from amos_fairseq.data.seeding import EpochOrder, Purpose, keyed_generator
from amos_fairseq.errors import UserError
from amos_fairseq.text import MASK_SYMBOL, special_ids


def num_masked_positions(mask_prob: float, length: int) -> int:
    """Return ceil(mask_prob * length), exact in the user's decimals: ceil(0.07 * 100) is 7, not 8."""
    return math.ceil(Fraction(str(mask_prob)) * length)


class MaskTreatment(NamedTuple):
    """The generator's input at masked positions: shares of random and of original tokens; the rest is ``<mask>``."""

    random: float
    unchanged: float


TREATMENTS = {
    "mask": MaskTreatment(0.0, 0.0),
    "bert": MaskTreatment(0.1, 0.1),  # Devlin et al., 2019; thesis section 5.4.3 names both tenths
    "electra": MaskTreatment(0.0, 0.15),  # ELECTRA's released code
}

# By the name of the criterion; the default of every other objective is "mask".
OF_OBJECTIVE = {"mlm": "bert", "electra": "electra"}


def treat_masked(
    originals: np.ndarray, treatment: MaskTreatment, mask: int, candidates: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return the generator's input [k] int64 at the masked positions of a block, whose tokens are ``originals`` [k].

    Each position is sampled independently, random tokens uniformly among the ids ``candidates`` [n]. ``generator``, that of the
    block, is not used if every position becomes ``<mask>``, the id ``mask``.
    """
    treated = np.full(len(originals), mask, dtype=np.int64)
    if treatment.random == treatment.unchanged == 0:
        return treated
    uniform = generator.random(len(originals))
    random_tokens = generator.choice(candidates, size=len(originals))
    is_random = uniform < treatment.random
    is_unchanged = uniform >= 1 - treatment.unchanged
    treated[is_random] = random_tokens[is_random]
    treated[is_unchanged] = originals[is_unchanged]
    return treated


class MaskedBlockDataset(EpochOrder, FairseqDataset):
    """Blocks that start with ``<s>`` and have k(L) masked positions each, L the real tokens of the block.

    Args:
        blocks: one-dimensional integer tensors of token ids without ``<s>``, for example fairseq's ``TokenBlockDataset``.
            A block longer than T - 1 is cut (one that ends with its paragraph can be longer).
        tokens_per_block: T, ``<s>`` included.
        mask_prob: share of a block's tokens that is masked; special tokens are counted in L but never masked.
        mask_weights: [tokens of the dictionary] float64, above 0; positions are sampled in proportion to the weights of
            their tokens, one after another without replacement. None: uniformly.
        word_starts: [tokens of the dictionary] bool, which tokens begin a word. The tokens of a word are then masked together,
            words in random order; of the last word, which may be cut, the first tokens. Special tokens end a word, and so
            does the end of the block. None: tokens are masked by themselves.
        training: masks and order change with the epoch (``set_epoch``); otherwise masks depend on (seed, block)
            alone and blocks keep their order.
        source: where the blocks come from, for error messages.
        unigram_entropy: of the text, in nats: added to every batch, None for no entry.
    """

    def __init__(
        self,
        blocks: Any,
        dictionary: Dictionary,
        *,
        tokens_per_block: int,
        mask_prob: float,
        seed: int,
        training: bool,
        treatment: MaskTreatment = TREATMENTS["mask"],
        mask_weights: np.ndarray | None = None,
        word_starts: np.ndarray | None = None,
        source: str = "the corpus",
        unigram_entropy: float | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.seed = seed
        self.training = training
        self.treatment = treatment
        self.mask_weights = mask_weights
        self.word_starts = word_starts
        self.source = source
        self.batch_values = {} if unigram_entropy is None else {"unigram_entropy": unigram_entropy}
        self.epoch = 1
        self.bos, self.pad, self.mask = dictionary.bos(), dictionary.pad(), dictionary.index(MASK_SYMBOL)
        self._maskable = np.ones(len(dictionary), dtype=bool)
        self._maskable[special_ids(dictionary)] = False
        self._candidates = np.flatnonzero(self._maskable)
        self.set_length(tokens_per_block, mask_prob)

    def set_length(self, tokens_per_block: int, mask_prob: float) -> None:
        self.tokens_per_block = tokens_per_block
        # Indexed by L, so that __getitem__ computes no fractions.
        self._num_masked = [num_masked_positions(mask_prob, length) for length in range(tokens_per_block + 1)]

    @property
    def slots(self) -> int:
        """k = ceil(mask_prob * T), the width of the position tensors."""
        return self._num_masked[self.tokens_per_block]

    def __len__(self) -> int:
        return len(self.blocks)

    def read(self, index: int) -> tuple[int, torch.Tensor]:
        """Return the number of a block from which its masks are sampled, and its tokens."""
        return index, self.blocks[index]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``id`` int, ``tokens`` LongTensor [L], ``positions`` LongTensor [<= k(L)] ascending, and ``masked``
        LongTensor of the same shape: the generator's input there."""
        index, block = self.read(int(index))
        block = block.numpy()[: self.tokens_per_block - 1]
        tokens = np.empty(len(block) + 1, dtype=np.int64)
        tokens[0], tokens[1:] = self.bos, block
        generator = self._generator(index)
        positions = self._sample_positions(index, tokens, generator)
        masked = treat_masked(tokens[positions], self.treatment, self.mask, self._candidates, generator)
        return {
            "id": index,
            "tokens": torch.from_numpy(tokens),
            "positions": torch.from_numpy(positions),
            "masked": torch.from_numpy(masked),
        }

    def _generator(self, index: int) -> np.random.Generator:
        """Return the generator of a block's masks, the same in every process that reads the block in this epoch."""
        if self.training:
            return keyed_generator(Purpose.TRAINING_MASK, self.seed, self.epoch, index)
        return keyed_generator(Purpose.VALIDATION_MASK, self.seed, 0, index)

    def _sample_positions(self, index: int, ids: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Sample without replacement among the block's non-special tokens, from (seed, epoch, block) and the weights alone."""
        if ids.max() >= len(self._maskable) or ids.min() < 0:
            raise UserError(
                f"{self.source} holds token id {int(ids.max())} in block {index}, but dict.txt gives ids up to "
                f"{len(self._maskable) - 1}: it was binarized with another dictionary; binarize the text again"
            )
        candidates = np.flatnonzero(self._maskable[ids])
        count = min(self._num_masked[len(ids)], len(candidates))
        if self.word_starts is not None:
            return np.sort(self._word_by_word(ids, candidates, generator)[:count]).astype(np.int64)
        shares = None
        if self.mask_weights is not None and count:
            weights = self.mask_weights[ids[candidates]]
            shares = weights / weights.sum()
        return np.sort(generator.choice(candidates, size=count, replace=False, p=shares)).astype(np.int64)

    def _word_by_word(self, ids: np.ndarray, candidates: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return the ``candidates``, ascending positions in ``ids``, with the words that they form in random order."""
        begins = self.word_starts[ids[candidates]]
        begins[1:] |= candidates[1:] > candidates[:-1] + 1  # a special token is between them
        begins[:1] = True
        # numpy sorts 16 bits much faster than more. Of two words with equal keys, the first comes first.
        keys = generator.integers(1 << 16, size=np.count_nonzero(begins), dtype=np.uint16)
        return candidates[np.argsort(keys[np.cumsum(begins) - 1], kind="stable")]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch in static shapes; ``{}`` for an empty list (a rank without data in the last validation step).

        Returns:
            ``id`` LongTensor [B]; ``nsentences``, ``ntokens`` (real tokens), ``num_masked`` and ``first_id`` Python
            ints, so the host does not wait for the device; ``net_input`` with ``tokens`` and ``masked_tokens``
            LongTensor [B, T], ``masked_positions`` LongTensor [B, k] (ascending, unused slots 0) and
            ``masked_weights`` FloatTensor [B, k] (1, unused slots 0).
        """
        if not samples:
            return {}
        tokens = np.full((len(samples), self.tokens_per_block), self.pad, dtype=np.int64)
        positions = np.zeros((len(samples), self.slots), dtype=np.int64)
        weights = np.zeros((len(samples), self.slots), dtype=np.float32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample["tokens"])] = sample["tokens"].numpy()
        masked_tokens = tokens.copy()
        for row, sample in enumerate(samples):
            masked_positions = sample["positions"].numpy()
            masked_tokens[row, masked_positions] = sample["masked"].numpy()
            positions[row, : len(masked_positions)] = masked_positions
            weights[row, : len(masked_positions)] = 1.0
        return {
            "id": torch.tensor([sample["id"] for sample in samples], dtype=torch.long),
            "nsentences": len(samples),
            "ntokens": sum(len(sample["tokens"]) for sample in samples),
            "num_masked": sum(len(sample["positions"]) for sample in samples),
            "first_id": samples[0]["id"],
            **self.batch_values,
            "net_input": {
                "tokens": torch.from_numpy(tokens),
                "masked_tokens": torch.from_numpy(masked_tokens),
                "masked_positions": torch.from_numpy(positions),
                "masked_weights": torch.from_numpy(weights),
            },
        }
