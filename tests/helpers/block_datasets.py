"""Random lines of token ids in memory, the masked blocks cut from them, and the batches of an epoch."""

import numpy as np
import torch
from fairseq.data import Dictionary, TokenBlockDataset

from amos_fairseq.data.block_iterator import BlockBatchIterator, equal_batches, whole_updates
from amos_fairseq.data.masked_blocks import MaskedBlockDataset

TOKENS_PER_BLOCK = 32
NUM_TOKENS = 40
NET_INPUT = ("tokens", "masked_tokens", "masked_positions", "masked_weights")


def block_dictionary() -> Dictionary:
    """Ids 0 to 3 are fairseq's, then 40 tokens, four filler symbols and ``<mask>`` (48)."""
    dictionary = Dictionary()
    for number in range(NUM_TOKENS):
        dictionary.add_symbol(f"w{number}")
    dictionary.pad_to_multiple_(8)  # 44 -> 48: four filler symbols
    dictionary.add_symbol("<mask>")
    return dictionary


class Lines(torch.utils.data.Dataset):
    """The interface of an indexed dataset: lines of token ids and their sizes."""

    def __init__(self, lines: list[list[int]]) -> None:
        self.lines = [torch.tensor(line, dtype=torch.int32) for line in lines]
        self.sizes = np.array([len(line) for line in lines])

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.lines[index]

    def __len__(self) -> int:
        return len(self.lines)


def random_lines(num_lines: int) -> list[list[int]]:
    """Random lines of tokens with some <unk> (3), each ended by </s> (2); some lines are empty."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 25, size=num_lines)
    return [[*generator.integers(3, 4 + NUM_TOKENS, size=length).tolist(), 2] for length in lengths]


def make_dataset(lines: list[list[int]], training: bool = True, **settings) -> MaskedBlockDataset:
    blocks, dictionary = Lines(lines), block_dictionary()
    dictionary.protected_symbols = settings.pop("protected", [])
    break_mode = settings.pop("break_mode", "none")
    blocks = TokenBlockDataset(blocks, blocks.sizes, TOKENS_PER_BLOCK - 1, pad=1, eos=2, break_mode=break_mode)
    settings = {"tokens_per_block": TOKENS_PER_BLOCK, "mask_prob": 0.15, "seed": 7, "training": training} | settings
    return MaskedBlockDataset(blocks, dictionary, **settings)


def iterate(dataset: MaskedBlockDataset, epoch: int, batch_size: int = 2, **settings) -> list[dict]:
    """The batches of one rank in one epoch."""
    dataset.set_epoch(epoch)
    indices = dataset.ordered_indices()
    indices = whole_updates(indices, 8, "test") if dataset.training else indices
    settings = {"num_shards": 1, "shard_id": 0, "num_workers": 0, "update_freq": 1, "buffer_size": 0} | settings
    iterator = BlockBatchIterator(dataset, equal_batches(indices, batch_size), epoch=epoch, **settings)
    return list(iterator.next_epoch_itr())


def rows_by_id(batches: list[dict]) -> dict[int, tuple]:
    """Block index -> (tokens, masked tokens, positions, weights) as lists, from all batches that are not empty."""
    rows = {}
    for batch in filter(None, batches):
        tensors = [batch["net_input"][name].tolist() for name in NET_INPUT]
        for row, block in enumerate(batch["id"].tolist()):
            assert block not in rows
            rows[block] = tuple(tensor[row] for tensor in tensors)
    return rows
