"""Blocks with masked positions: counts against hand arithmetic, equality over loader processes and ranks."""

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, TokenBlockDataset

from amos_fairseq.data.block_iterator import BlockBatchIterator, equal_batches, whole_updates
from amos_fairseq.data.masked_blocks import MaskedBlockDataset, num_masked_positions
from amos_fairseq.errors import UserError
from amos_fairseq.special_tokens import special_ids

TOKENS_PER_BLOCK = 32
NUM_WORDS = 40


@pytest.fixture(scope="module")
def dictionary() -> Dictionary:
    dictionary = Dictionary()
    for word in range(NUM_WORDS):
        dictionary.add_symbol(f"w{word}")
    dictionary.pad_to_multiple_(8)  # 44 -> 48: four filler words
    dictionary.add_symbol("<mask>")
    return dictionary


class Lines(torch.utils.data.Dataset):
    """What an indexed dataset offers: lines of token ids and their sizes."""

    def __init__(self, lines: list[list[int]]) -> None:
        self.lines = [torch.tensor(line, dtype=torch.int32) for line in lines]
        self.sizes = np.array([len(line) for line in lines])

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.lines[index]

    def __len__(self) -> int:
        return len(self.lines)


def made_up_lines(num_lines: int) -> list[list[int]]:
    """Seeded lines with <unk> (3) among the words and </s> (2) behind each; an empty line here and there."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 25, size=num_lines)
    return [[*generator.integers(3, 4 + NUM_WORDS, size=length).tolist(), 2] for length in lengths]


def make_dataset(
    dictionary: Dictionary, lines: list[list[int]], training: bool = True, **settings
) -> MaskedBlockDataset:
    blocks = Lines(lines)
    break_mode = settings.pop("break_mode", "none")
    blocks = TokenBlockDataset(blocks, blocks.sizes, TOKENS_PER_BLOCK - 1, pad=1, eos=2, break_mode=break_mode)
    settings = {"tokens_per_block": TOKENS_PER_BLOCK, "mask_prob": 0.15, "seed": 7, "training": training} | settings
    return MaskedBlockDataset(blocks, dictionary, **settings)


def iterate(dataset: MaskedBlockDataset, epoch: int, batch_size: int = 2, **settings) -> list[dict]:
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


NET_INPUT = ("tokens", "masked_tokens", "masked_positions", "masked_weights")


@pytest.mark.parametrize(
    ("mask_prob", "length", "expected"),
    [(0.15, 512, 77), (0.15, 128, 20), (0.15, 20, 3), (0.15, 1, 1), (0.07, 100, 7), (0.25, 512, 128), (0.15, 0, 0)],
)
def test_number_of_masked_positions_by_hand(mask_prob: float, length: int, expected: int) -> None:
    assert num_masked_positions(mask_prob, length) == expected


def test_specials_are_fairseqs_four_the_filler_and_mask(dictionary: Dictionary) -> None:
    assert special_ids(dictionary) == [0, 1, 2, 3, 44, 45, 46, 47, 48]


def test_exactly_k_words_are_masked_and_never_a_special(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, made_up_lines(300))
    batches = iterate(dataset, epoch=1)
    rows = rows_by_id(batches)
    assert len(rows) == len(dataset) // 8 * 8 > 80
    for tokens, masked_tokens, positions, weights in rows.values():
        length = sum(token != 1 for token in tokens)
        used = positions[: int(sum(weights))]
        assert len(used) == num_masked_positions(0.15, length)
        assert used == sorted(set(used))
        assert all(4 <= tokens[position] < 4 + NUM_WORDS for position in used)
        changed = [position for position in range(TOKENS_PER_BLOCK) if tokens[position] != masked_tokens[position]]
        assert changed == used
        assert all(masked_tokens[position] == 48 for position in used)
    for batch in batches:
        assert all(type(batch[name]) is int for name in ("nsentences", "ntokens", "num_masked", "first_id"))
        assert batch["num_masked"] == int(batch["net_input"]["masked_weights"].sum())
        assert batch["ntokens"] == int(batch["net_input"]["tokens"].ne(1).sum())
        assert batch["first_id"] == int(batch["id"][0])


def test_blocks_hold_the_text_in_order(dictionary: Dictionary) -> None:
    lines = made_up_lines(50)
    rows = rows_by_id(iterate(make_dataset(dictionary, lines, training=False), epoch=1))
    joined = [token for block in sorted(rows) for token in rows[block][0][1:] if token != 1]
    assert joined == [token for line in lines for token in line]
    assert all(tokens[0] == 0 for tokens, *_ in rows.values())


def test_every_word_is_masked_equally_often(dictionary: Dictionary) -> None:
    """One block of 31 words, 2,000 epochs: each position is hit k / 31 of the time, within 5 standard deviations."""
    dataset = make_dataset(dictionary, [list(range(4, 35))])
    hits = np.zeros(TOKENS_PER_BLOCK)
    for epoch in range(1, 2001):
        dataset.set_epoch(epoch)
        hits[dataset[0]["positions"].numpy()] += 1
    share = 5 / 31
    assert hits[0] == 0
    assert np.abs(hits[1:] - 2000 * share).max() < 5 * np.sqrt(2000 * share * (1 - share))


def test_short_last_block_pads_its_slots(dictionary: Dictionary) -> None:
    """31 + 9 words: the second block is <s> and 9 words, so ceil(0.15 * 10) = 2 of 5 slots are used."""
    dataset = make_dataset(dictionary, [list(range(4, 44))], training=False)
    batch = dataset.collater([dataset[0], dataset[1]])
    assert {name: tuple(tensor.shape) for name, tensor in batch["net_input"].items()} == {
        "tokens": (2, 32), "masked_tokens": (2, 32), "masked_positions": (2, 5), "masked_weights": (2, 5)
    }  # fmt: skip
    assert batch["net_input"]["masked_weights"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["net_input"]["masked_positions"][1, 2:].tolist() == [0, 0, 0]
    assert batch["net_input"]["masked_tokens"][:, 0].tolist() == [0, 0]
    assert batch["net_input"]["tokens"][1, 10:].tolist() == [1] * 22
    assert (batch["ntokens"], batch["num_masked"], batch["nsentences"]) == (42, 7, 2)


def test_fewer_words_than_k_masks_them_all(dictionary: Dictionary) -> None:
    """31 tokens of which 2 are words; and a block of nothing but specials, which masks nothing."""
    dataset = make_dataset(dictionary, [[3] * 20 + [5, 6] + [2] * 9 + [2] * 31])
    first, second = dataset[0], dataset[1]
    assert first["positions"].tolist() == [21, 22]
    assert second["positions"].tolist() == []
    assert second["positions"].dtype == torch.int64
    batch = dataset.collater([second])
    assert batch["num_masked"] == 0
    assert batch["net_input"]["masked_weights"].tolist() == [[0] * 5]
    assert torch.equal(batch["net_input"]["masked_tokens"], batch["net_input"]["tokens"])


def test_empty_batch_of_a_rank_without_data(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, made_up_lines(60), training=False)
    assert dataset.collater([]) == {}
    num_batches = -(-len(dataset) // 2)
    ranks = 4 if num_batches % 4 else 3
    shares = [iterate(dataset, 1, num_shards=ranks, shard_id=rank) for rank in range(ranks)]
    assert sum(batch == {} for share in shares for batch in share) > 0
    together = rows_by_id([batch for share in shares for batch in share])
    assert together == rows_by_id(iterate(dataset, 1))


@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 2), (2, 1), (4, 0)])
def test_equal_for_any_ranks_and_loader_processes(dictionary: Dictionary, num_shards: int, num_workers: int) -> None:
    """Epoch 2 in a fresh process, where fairseq's kept loader processes would repeat epoch 1."""
    lines = made_up_lines(300)
    expected = rows_by_id(iterate(make_dataset(dictionary, lines), epoch=2))
    batches = []
    for rank in range(num_shards):
        dataset = make_dataset(dictionary, lines)
        iterate(dataset, 1, num_shards=num_shards, shard_id=rank, num_workers=num_workers)
        batches += iterate(dataset, 2, num_shards=num_shards, shard_id=rank, num_workers=num_workers)
    assert rows_by_id(batches) == expected


@pytest.mark.parametrize(("num_shards", "batch_size"), [(1, 2), (2, 2), (4, 1), (1, 8)])
def test_every_update_holds_the_same_blocks(dictionary: Dictionary, num_shards: int, batch_size: int) -> None:
    """Global batch 8: however it is split, update u takes the u-th eight blocks of the order."""
    dataset = make_dataset(dictionary, made_up_lines(300))
    update_freq = 8 // (num_shards * batch_size)
    shares = [
        iterate(dataset, 1, batch_size=batch_size, num_shards=num_shards, shard_id=rank) for rank in range(num_shards)
    ]
    dataset.set_epoch(1)
    order = dataset.ordered_indices()
    for update in range(len(order) // 8):
        taken = [
            block
            for share in shares
            for batch in share[update * update_freq : (update + 1) * update_freq]
            for block in batch["id"].tolist()
        ]
        assert sorted(taken) == sorted(order[8 * update : 8 * update + 8].tolist())


def test_epochs_differ_in_masks_and_order(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, made_up_lines(300))
    first, second, again = (rows_by_id(iterate(dataset, epoch)) for epoch in (1, 2, 1))
    assert first == again
    assert list(first) != list(second)
    common = first.keys() & second.keys()
    # Two draws of 5 from about 30 agree with probability 1 / 142,506.
    assert sum(first[block] == second[block] for block in common) <= 1
    assert all(first[block][0] == second[block][0] for block in common)


def test_validation_ignores_the_epoch_and_keeps_the_order(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, made_up_lines(100), training=False)
    first, third = rows_by_id(iterate(dataset, 1)), rows_by_id(iterate(dataset, 3))
    assert first == third
    assert list(first) == list(range(len(dataset)))


def test_seed_and_purpose_separate_the_masks(dictionary: Dictionary) -> None:
    lines = made_up_lines(100)
    masks = [
        [make_dataset(dictionary, lines, **settings)[block]["positions"].tolist() for block in range(20)]
        for settings in ({}, {"seed": 8}, {"training": False})
    ]
    assert masks[0] != masks[1]
    assert masks[0] != masks[2]


def test_global_random_state_is_neither_used_nor_changed(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, made_up_lines(100))
    np.random.seed(1)
    torch.manual_seed(1)
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    first = dataset.ordered_indices(), dataset[3]["positions"]
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.random.seed(2)
    torch.manual_seed(2)
    assert np.array_equal(dataset.ordered_indices(), first[0])
    assert torch.equal(dataset[3]["positions"], first[1])


def test_long_paragraph_blocks_are_cut(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, [[*[5] * 50, 2], [6, 7, 2]], break_mode="complete", training=False)
    assert dataset[0]["tokens"].tolist() == [0] + [5] * 31
    assert dataset[1]["tokens"].tolist() == [0, 6, 7, 2]


def test_foreign_token_id_is_refused(dictionary: Dictionary) -> None:
    dataset = make_dataset(dictionary, [[5] * 30 + [49]], source="DATA/train")
    with pytest.raises(UserError, match=r"DATA/train holds token id 49 in block 0, but dict.txt gives ids up to 48"):
        dataset[0]


def test_corpus_smaller_than_one_update_is_refused() -> None:
    assert whole_updates(np.arange(17), 8, "DATA/train").tolist() == list(range(16))
    with pytest.raises(UserError, match=r"DATA/train has 7 blocks, fewer than the 8 of one update"):
        whole_updates(np.arange(7), 8, "DATA/train")
