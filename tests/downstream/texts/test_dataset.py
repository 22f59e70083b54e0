"""Rows of one and two texts, joined and cut, by hand."""

import numpy as np
import pytest
import torch
from fairseq.data import ConcatSentencesDataset, ListDataset

from amos_fairseq.downstream.texts.dataset import ShortenedTexts, join_texts
from amos_fairseq.errors import UserError


def texts(*lengths: int) -> ListDataset:
    """Rows of the tokens 10, 11, 12, ... and ``</s>``."""
    return ListDataset([torch.tensor([*range(10, 10 + n), 2]) for n in lengths], np.array(lengths) + 1)


@pytest.mark.parametrize(
    ("separator", "limit", "expected"),
    [
        (None, 9, [0, 10, 11, 12, 13, 2, 10, 11, 2]),
        (None, 7, [0, 10, 11, 2, 10, 11, 2]),
        (None, 6, [0, 10, 11, 2, 10, 2]),
        (2, 10, [0, 10, 11, 12, 13, 2, 2, 10, 11, 2]),
        (2, 7, [0, 10, 11, 2, 2, 10, 2]),
        (7, 8, [0, 10, 11, 2, 7, 10, 11, 2]),
    ],
)
def test_pairs_by_hand(separator: int | None, limit: int, expected: list[int]) -> None:
    rows = ShortenedTexts(join_texts([texts(4), texts(2)], bos=0, separator=separator), limit)
    assert rows[0].tolist() == expected
    assert rows.sizes.tolist() == [len(expected)]
    assert rows.num_cut == (limit < (9 if separator is None else 10))


def test_single_texts_keep_their_end() -> None:
    rows = ShortenedTexts(join_texts([texts(5, 1, 0)], bos=0, separator=2), 4)
    assert [rows[i].tolist() for i in range(3)] == [[0, 10, 11, 2], [0, 10, 2], [0, 2]]
    assert (rows.sizes.tolist(), rows.num_cut) == ([4, 3, 2], 1)


def test_rows_without_an_initial_token() -> None:
    rows = ShortenedTexts(ConcatSentencesDataset(texts(1, 6), texts(6, 6)), 6)
    assert [rows[i].tolist() for i in range(2)] == [[10, 2, 10, 11, 12, 2], [10, 11, 2, 10, 11, 2]]


def test_no_room_is_refused() -> None:
    joined = join_texts([texts(4), texts(2)], bos=0, separator=2)
    assert ShortenedTexts(joined, 6)[0].tolist() == [0, 10, 2, 2, 10, 2]
    with pytest.raises(UserError, match="--max-positions 5 leaves no room"):
        ShortenedTexts(joined, 5)
