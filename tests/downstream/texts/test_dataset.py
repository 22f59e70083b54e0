"""Rows of one and two texts, joined and cut, by hand, and by ``sentence_prediction``, whose truncation is replaced."""

import logging

import numpy as np
import pytest
import torch
from fairseq.data import ConcatSentencesDataset, ListDataset
from fairseq.data.shorten_dataset import RandomCropDataset
from fairseq.tasks import sentence_prediction

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


def test_the_truncation_of_sentence_prediction(caplog) -> None:
    """``truncate`` is ours, and counted in the log; other splits and methods are fairseq's."""
    rows = join_texts([texts(3, 1)], bos=0, separator=None)
    with caplog.at_level(logging.INFO, "amos_fairseq.downstream.texts.task"):
        cut = sentence_prediction.maybe_shorten_dataset(rows, "valid", "", "truncate", 3, 1)
    assert [cut[i].tolist() for i in range(2)] == [[0, 10, 2], [0, 10, 2]]
    assert "valid: 1 of 2 rows have more than 3 tokens" in caplog.text
    for arguments in (("train", "", "none"), ("train", "valid,test", "truncate")):
        assert sentence_prediction.maybe_shorten_dataset(rows, *arguments, 3, 1) is rows
    cropped = sentence_prediction.maybe_shorten_dataset(rows, "train", "", "random_crop", 3, 1)
    assert isinstance(cropped, RandomCropDataset)
