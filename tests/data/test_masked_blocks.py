"""Blocks and their masked positions against hand arithmetic and probability bands; inputs at these positions."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from block_datasets import NUM_TOKENS, block_dictionary, iterate, make_dataset, random_lines, rows_by_id
from synthetic_corpus import make_task, write_corpus

from amos_fairseq.data.masked_blocks import TREATMENTS, num_masked_positions, treat_masked
from amos_fairseq.data.seeding import Purpose, keyed_generator
from amos_fairseq.errors import UserError
from amos_fairseq.text import special_ids


@pytest.mark.parametrize(
    ("mask_prob", "length", "expected"),
    [(0.15, 512, 77), (0.15, 128, 20), (0.15, 20, 3), (0.15, 1, 1), (0.07, 100, 7), (0.25, 512, 128), (0.15, 0, 0)],
)
def test_number_of_masked_positions_by_hand(mask_prob: float, length: int, expected: int) -> None:
    assert num_masked_positions(mask_prob, length) == expected


def test_exactly_k_tokens_are_masked_and_never_a_special_one() -> None:
    dataset = make_dataset(random_lines(300))
    batches = iterate(dataset, epoch=1)
    rows = rows_by_id(batches)
    assert len(rows) == len(dataset) // 8 * 8 > 80
    for tokens, masked_tokens, positions, weights in rows.values():
        length = sum(token != 1 for token in tokens)
        used = positions[: int(sum(weights))]
        assert len(used) == num_masked_positions(0.15, length)
        assert used == sorted(set(used))
        assert all(4 <= tokens[position] < 4 + NUM_TOKENS for position in used)
        changed = [position for position in range(len(tokens)) if tokens[position] != masked_tokens[position]]
        assert changed == used
        assert all(masked_tokens[position] == 48 for position in used)
    for batch in batches:
        assert all(type(batch[name]) is int for name in ("nsentences", "ntokens", "num_masked", "first_id"))
        assert batch["num_masked"] == int(batch["net_input"]["masked_weights"].sum())
        assert batch["ntokens"] == int(batch["net_input"]["tokens"].ne(1).sum())
        assert batch["first_id"] == int(batch["id"][0])


def test_tokens_of_larger_weight_are_masked_more_often() -> None:
    """Two of six tokens, one after another: i is the first with probability w_i, or the second after j with w_j w_i / (1 -
    w_j); within 5 standard deviations of 1,500 epochs."""
    weights = np.ones(49)
    weights[4:10] = [1, 2, 4, 8, 16, 32]
    dataset = make_dataset([[4, 5, 6, 7, 8, 9]], mask_weights=weights)
    hits = np.zeros(6)
    for epoch in range(1, 1501):
        dataset.set_epoch(epoch)
        hits[dataset[0]["positions"].numpy() - 1] += 1
    first = weights[4:10] / 63
    expected = first + [sum(first[j] * first[i] / (1 - first[j]) for j in range(6) if j != i) for i in range(6)]
    assert expected.sum() == pytest.approx(2)
    assert (np.abs(hits - 1500 * expected) < 5 * np.sqrt(1500 * expected * (1 - expected))).all()


def test_protected_tokens_are_as_special_as_the_others() -> None:
    """Neither masked nor drawn as random tokens: 20 of 40 tokens."""
    dataset = make_dataset(random_lines(300), treatment=TREATMENTS["bert"], protected=[f"w{i}" for i in range(20)])
    blocks = [dataset[index] for index in range(len(dataset))]
    originals = torch.cat([block["tokens"][block["positions"]] for block in blocks])
    assert originals.unique().tolist() == [*range(24, 44)]
    assert torch.cat([block["masked"] for block in blocks]).unique().tolist() == [*range(24, 44), 48]


def words_of(tokens: list[int], starts: np.ndarray) -> list[list[int]]:
    """The positions of each word, one token after another; ids up to 3 and from 44 on are special."""
    words, continues = [], False
    for position, token in enumerate(tokens):
        is_ordinary = 4 <= token < 44
        if is_ordinary and continues and not starts[token]:
            words[-1].append(position)
        elif is_ordinary:
            words.append([position])
        continues = is_ordinary
    return words


def test_words_are_masked_whole_but_for_the_last() -> None:
    """k tokens of each block: whole words, and the first tokens of at most one more. Another process masks the same."""
    starts = np.zeros(49, dtype=bool)
    starts[4:24] = True
    dataset, other = (make_dataset(random_lines(300), word_starts=starts) for _ in range(2))
    num_cut, orders = 0, set()
    for index in reversed(range(len(dataset))):
        sample = dataset[index]
        masked, tokens = sample["positions"].tolist(), sample["tokens"].tolist()
        words = words_of(tokens, starts)
        assert len(masked) == num_masked_positions(0.15, len(tokens))
        touched = [word for word in words if set(word) & set(masked)]
        cut = [word for word in touched if not set(word) <= set(masked)]
        assert masked == sorted(p for word in touched for p in (word if word not in cut else set(word) & set(masked)))
        assert len(cut) <= 1
        assert all(set(word[: len(set(word) & set(masked))]) <= set(masked) for word in cut)
        num_cut += len(cut)
        orders.add(words.index(touched[0]))
        assert other[index]["positions"].equal(sample["positions"])
    assert len(dataset) / 10 < num_cut < len(dataset)
    assert len(orders) > 5


def test_a_special_token_ends_a_word() -> None:
    """Tokens without a mark of a new word, one between two special ones: each is a word, and not the first five are masked."""
    dataset, masks = make_dataset([[30, 2] * 15 + [30]], word_starts=np.zeros(49, dtype=bool)), set()
    for epoch in range(1, 11):
        dataset.set_epoch(epoch)
        masks.add(tuple(dataset[0]["positions"].tolist()))
    assert len(masks) == 10


def test_words_are_masked_as_often_as_in_shuffled_lists() -> None:
    """31 tokens in words of 1 to 4 tokens, half of them masked: 2,000 epochs against 20,000 shuffled lists of words, within 5
    standard deviations. Each token is masked about half of the time; the ends of words, which are cut, somewhat less often."""
    starts = np.zeros(49, dtype=bool)
    starts[[4, 5, 7, 10, 14, 15, 17, 20, 24, 25, 27, 30, 34]] = True
    words = words_of([0, *range(4, 35)], starts)
    dataset, hits, expected = make_dataset([list(range(4, 35))], word_starts=starts, mask_prob=0.5), *np.zeros((2, 32))
    for epoch in range(1, 2001):
        dataset.set_epoch(epoch)
        hits[dataset[0]["positions"].numpy()] += 1 / 2000
    draw = random.Random(1)
    for _ in range(20_000):
        expected[[position for word in draw.sample(words, len(words)) for position in word][:16]] += 1 / 20_000
    assert np.abs(hits - expected).max() < 5 * 0.5 * np.sqrt(1 / 2000 + 1 / 20_000)
    assert expected[1:] == pytest.approx(16 / 31, abs=0.06)


@pytest.mark.parametrize("training", [True, False])
def test_masks_are_a_choice_of_numpy_with_the_key_of_the_block(training: bool) -> None:
    """Uniform, and of (purpose, seed, epoch, block) alone, whatever the global generators do; validation has no epochs."""
    dataset = make_dataset(random_lines(100), training=training, seed=8)
    dataset.set_epoch(3)
    purpose, epoch = (Purpose.TRAINING_MASK, 3) if training else (Purpose.VALIDATION_MASK, 0)
    for index in range(10):
        tokens = dataset[index]["tokens"].numpy()
        candidates = np.flatnonzero((tokens >= 4) & (tokens < 44))
        count = num_masked_positions(0.15, len(tokens))
        expected = keyed_generator(purpose, 8, epoch, index).choice(candidates, size=count, replace=False)
        assert dataset[index]["positions"].tolist() == sorted(expected)


def test_short_last_block_pads_its_slots() -> None:
    """31 + 9 tokens: the second block is <s> and 9 tokens, so ceil(0.15 * 10) = 2 of 5 slots are used."""
    dataset = make_dataset([list(range(4, 44))], training=False)
    batch = dataset.collater([dataset[0], dataset[1]])
    shapes = {"tokens": (2, 32), "masked_tokens": (2, 32), "masked_positions": (2, 5), "masked_weights": (2, 5)}
    assert {name: tuple(tensor.shape) for name, tensor in batch["net_input"].items()} == shapes
    assert batch["net_input"]["masked_weights"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["net_input"]["masked_positions"][1, 2:].tolist() == [0, 0, 0]
    assert batch["net_input"]["masked_tokens"][:, 0].tolist() == [0, 0]
    assert batch["net_input"]["tokens"][1, 10:].tolist() == [1] * 22
    assert (batch["ntokens"], batch["num_masked"], batch["nsentences"]) == (42, 7, 2)


def test_fewer_maskable_tokens_than_k() -> None:
    """31 tokens of which 2 are ordinary; and a block of nothing but specials, which masks nothing."""
    dataset = make_dataset([[3] * 20 + [5, 6] + [2] * 9 + [2] * 31])
    first, second = dataset[0], dataset[1]
    assert first["positions"].tolist() == [21, 22]
    assert second["positions"].tolist() == []
    assert second["positions"].dtype == torch.int64
    batch = dataset.collater([second])
    assert batch["num_masked"] == 0
    assert batch["net_input"]["masked_weights"].tolist() == [[0] * 5]
    assert torch.equal(batch["net_input"]["masked_tokens"], batch["net_input"]["tokens"])


def test_long_paragraph_blocks_are_cut() -> None:
    dataset = make_dataset([[*[5] * 50, 2], [6, 7, 2]], break_mode="complete", training=False)
    assert dataset[0]["tokens"].tolist() == [0] + [5] * 31
    assert dataset[1]["tokens"].tolist() == [0, 6, 7, 2]


def test_foreign_token_id_is_refused() -> None:
    dataset = make_dataset([[5] * 30 + [49]], source="DATA/train")
    with pytest.raises(UserError, match=r"DATA/train holds token id 49 in block 0, but dict.txt gives ids up to 48"):
        dataset[0]


MASK_ID = 999
ORDINARY = np.arange(10, 60)
NUM_SAMPLES = 40_000
# 5 standard deviations of a share of 40,000 samples.
BAND = 5 * np.sqrt(0.25 / NUM_SAMPLES)


def shares(name: str) -> tuple[float, float, float]:
    """Shares of masked tokens that become ``<mask>``, become another token, and stay (a random token can be the original)."""
    originals = np.full(NUM_SAMPLES, ORDINARY[0])
    treated = treat_masked(originals, TREATMENTS[name], MASK_ID, ORDINARY, np.random.default_rng(1))
    masked, unchanged = (treated == MASK_ID).mean(), (treated == originals).mean()
    assert np.isin(treated, [MASK_ID, *ORDINARY]).all()
    return masked, 1 - masked - unchanged, unchanged


def test_shares_match_the_papers() -> None:
    assert shares("mask") == (1.0, 0.0, 0.0)
    by_chance = 0.1 / len(ORDINARY)  # random tokens that are the original
    assert shares("bert") == pytest.approx((0.8, 0.1 - by_chance, 0.1 + by_chance), abs=BAND)
    masked, random, unchanged = shares("electra")
    assert random == pytest.approx(0, abs=1e-12)
    assert (masked, unchanged) == pytest.approx((0.85, 0.15), abs=BAND)


def test_random_tokens_are_uniform() -> None:
    treated = treat_masked(np.full(NUM_SAMPLES, 5), TREATMENTS["bert"], MASK_ID, ORDINARY, np.random.default_rng(2))
    counts = np.array([(treated == token).sum() for token in ORDINARY])
    expected = NUM_SAMPLES * 0.1 / len(ORDINARY)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_treatment_changes_only_masked_tokens_and_is_deterministic() -> None:
    lines = random_lines(100)
    plain, bert = (make_dataset(lines, treatment=TREATMENTS[name]) for name in ("mask", "bert"))
    special = set(special_ids(block_dictionary()))
    treated = 0
    for index in range(20):
        one, other, again = plain[index], bert[index], bert[index]
        assert one["positions"].equal(other["positions"])
        assert one["tokens"].equal(other["tokens"])
        assert other["masked"].equal(again["masked"])
        assert one["masked"].eq(plain.mask).all()
        not_masked = other["masked"].ne(bert.mask)
        assert not set(other["masked"][not_masked].tolist()) & special
        treated += int(not_masked.sum())
    assert treated > 0
    batch = bert.collater([bert[3], bert[4]])["net_input"]
    for row, index in enumerate((3, 4)):
        sample = bert[index]
        assert batch["masked_tokens"][row, sample["positions"]].equal(sample["masked"])


def test_default_treatment_of_an_objective(tmp_path: Path) -> None:
    corpus, of_objectives = write_corpus(tmp_path / "corpus"), {"mlm": "bert", "electra": "electra", "amos": "mask"}
    rows = [(objective, "default", expected) for objective, expected in of_objectives.items()]
    for objective, treatment, expected in [*rows, ("mlm", "mask", "mask"), ("amos", "electra", "electra")]:
        task = make_task(corpus, objective=objective, mask_treatment=treatment)
        assert task.mask_treatment == TREATMENTS[expected]
        task.load_dataset("train")
        assert task.datasets["train"].treatment == TREATMENTS[expected]
