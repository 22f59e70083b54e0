"""Blocks of a memory-mapped corpus against fairseq's blocks; counts of its tokens against a naive count."""

import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary, TokenBlockDataset, indexed_dataset
from small_models import small_electra
from synthetic_corpus import make_task, write_corpus, write_split

from amos_fairseq.data import corpus as corpus_module
from amos_fairseq.data.corpus import MappedBlocks, read_blocks
from amos_fairseq.errors import UserError


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


def naive_counts(*directories: Path) -> Counter:
    """From the bytes of the files: ``write_split`` stores 16-bit integers."""
    files = [file for directory in directories for file in directory.glob("train*.bin")]
    return Counter(number for file in files for number in memoryview(file.read_bytes()).cast("H"))


def test_all_parts_of_all_shards_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 7 tokens, so that the last of a file is not full; ``</s>`` ends every line and is not counted."""
    monkeypatch.setattr(corpus_module, "TOKENS_AT_ONCE", 7)
    shards = [write_corpus(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    write_split(shards[1], "train1", 11, seed=9)
    counts = make_task(f"{shards[0]}:{shards[1]}").count_training_tokens()
    expected = naive_counts(*shards)
    assert expected[2] == 60 + 60 + 11
    assert counts.tolist() == [expected[token] if 4 <= token < 34 else 0 for token in range(35)]
    assert counts.dtype == torch.int64


def test_rare_tokens_have_larger_weights_in_training_alone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    task = make_task(corpus, mask_rare_tokens=0.5)
    for split in ("train", "valid"):
        task.load_dataset(split)
    counts, weights = naive_counts(corpus), task.dataset("train").mask_weights
    assert weights.tolist() == pytest.approx([max(1, counts[token] if token > 3 else 0) ** -0.5 for token in range(35)])
    assert task.dataset("valid").mask_weights is None
    with pytest.raises(UserError, match="no meaning for the criterion electric"):
        make_task(corpus, mask_rare_tokens=0.5, objective="electric")
    uniform = make_task(corpus)
    uniform.load_dataset("train")
    assert uniform.dataset("train").mask_weights is None


@pytest.mark.parametrize("is_mapped", [True, False])
def test_counts_of_ranks_add_up(is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of three ranks add up to those of one; other data sets are read line by line."""
    monkeypatch.setattr(corpus_module, "TOKENS_AT_ONCE", 7)
    monkeypatch.setattr(corpus_module, "LINES_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(4, 40, (length,), generator=generator) for length in range(1, 61)]
    expected = Counter(torch.cat(text).tolist())
    if is_mapped:
        builder = indexed_dataset.make_builder(str(tmp_path / "text.bin"), "mmap", vocab_size=40)
        for line in text:
            builder.add_item(line)
        builder.finalize(str(tmp_path / "text.idx"))
        text = indexed_dataset.make_dataset(str(tmp_path / "text"), "mmap")
    whole = corpus_module.count_tokens([text], 40).tolist()
    assert whole == [expected[token] for token in range(40)]
    parts = [corpus_module.count_tokens([text], 40, rank, num_ranks=3) for rank in range(3)]
    assert sum(parts).tolist() == whole
    assert all(part.any() for part in parts)


def test_a_text_of_special_tokens_alone_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_lines=0)
    with pytest.raises(UserError, match="holds no token"):
        make_task(corpus).count_training_tokens()


def test_task_counts_for_a_unigram_model_before_its_first_update(tmp_path: Path, monkeypatch) -> None:
    """A model that has its counts from a checkpoint, or needs none, is left alone."""
    corpus = write_corpus(tmp_path / "corpus")
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    models = [small_electra(num_tokens=30, generator="unigram"), small_electra(num_tokens=30)]
    with pytest.raises(UserError, match="--generator unigram"):
        models[0].check_ready()
    counted = []
    counting = task.count_training_tokens
    monkeypatch.setattr(task, "count_training_tokens", lambda: counted.append(1) or counting())
    for epoch in (1, 2):
        for model in models:
            task.begin_epoch(epoch, model)
            model.check_ready()
    assert counted == [1]
    counts = models[0].token_noise.counts
    assert counts[:35].tolist() == [naive_counts(corpus)[token] if 4 <= token < 34 else 0 for token in range(35)]
    assert counts[35:].eq(0).all()
