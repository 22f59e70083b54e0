"""Blocks that are slices of the file against fairseq's blocks, which are joined from paragraphs."""

import pickle
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary, TokenBlockDataset

from amos_fairseq.data.corpus import MappedBlocks, read_blocks


@pytest.mark.parametrize("break_mode", ["none", "complete", "complete_doc"])
@pytest.mark.parametrize("tokens_per_block", [16, 300])
def test_mapped_blocks_match_fairseqs_blocks(break_mode: str, tokens_per_block: int, binarized_corpus: Path) -> None:
    """Every block: within a paragraph, over several, empty lines of the text between documents included."""
    dictionary = Dictionary.load(str(binarized_corpus / "dict.txt"))
    found = read_blocks(str(binarized_corpus / "train"), dictionary, tokens_per_block, break_mode)
    assert isinstance(found, MappedBlocks)
    expected = found.blocks
    assert isinstance(expected, TokenBlockDataset)
    assert len(found) == len(expected) > 10
    sent = pickle.loads(pickle.dumps(found))  # to a loader process that is spawned
    for index in range(len(found)):
        assert found[index].dtype == torch.int64
        assert found[index].equal(expected[index]), index
        assert sent[index].equal(expected[index]), index


def test_several_files_are_read_by_paragraphs(binarized_corpus: Path, tmp_path: Path) -> None:
    """train and train1, which make one text in two files: blocks go over the border between them."""
    for name in ("train", "train1"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").symlink_to(binarized_corpus / f"valid{suffix}")
    dictionary = Dictionary.load(str(binarized_corpus / "dict.txt"))
    blocks = read_blocks(str(tmp_path / "train"), dictionary, 32, "none", combine=True)
    assert isinstance(blocks, TokenBlockDataset)
    one = read_blocks(str(tmp_path / "train"), dictionary, 32, "none")
    joined, single = (torch.cat([given[index] for index in range(len(given))]) for given in (blocks, one))
    assert joined.equal(torch.cat([single, single]))
