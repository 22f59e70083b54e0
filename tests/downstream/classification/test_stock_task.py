"""``--shorten-method truncate`` of ``sentence_prediction``: replaced, counted in the log, and stock's for everything else."""

import logging

import pytest
import torch
from fairseq.data import ListDataset, PrependTokenDataset
from fairseq.data.shorten_dataset import RandomCropDataset
from fairseq.tasks import sentence_prediction


@pytest.fixture
def rows() -> PrependTokenDataset:
    return PrependTokenDataset(ListDataset([torch.tensor([7, 8, 9, 2]), torch.tensor([7, 2])], [4, 2]), 0)


def test_truncation_keeps_the_end_and_is_counted(rows, caplog):
    with caplog.at_level(logging.INFO, "amos_fairseq.downstream.classification.stock_task"):
        cut = sentence_prediction.maybe_shorten_dataset(rows, "valid", "", "truncate", 3, 1)
    assert [cut[i].tolist() for i in range(2)] == [[0, 7, 2], [0, 7, 2]]
    assert "valid: 1 of 2 rows have more than 3 tokens" in caplog.text


@pytest.mark.parametrize("arguments", [("train", "", "none"), ("train", "valid,test", "truncate")])
def test_other_splits_and_methods_are_unchanged(rows, arguments, caplog):
    assert sentence_prediction.maybe_shorten_dataset(rows, *arguments, 3, 1) is rows
    cropped = sentence_prediction.maybe_shorten_dataset(rows, "train", "", "random_crop", 3, 1)
    assert isinstance(cropped, RandomCropDataset)
    assert caplog.text == ""
