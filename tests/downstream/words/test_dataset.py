"""Sentences of labeled words: the cut at word boundaries, and batches."""

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from amos_fairseq.downstream.words.dataset import NO_LABEL, TaggedSentences
from amos_fairseq.downstream.words.prepare import ARRAYS
from amos_fairseq.errors import UserError

# Pieces of each word of three sentences, and labels.
NUM_LABELS = 3
SENTENCES = [([2, 1, 3], [0, 1, 2]), ([1], [1]), ([6, 1], [2, 0])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("tagging"))


def write_files(directory, num_behind: int = 0):
    """``num_behind``: pieces behind the last word of each sentence, which belong to no word."""
    for name in ARRAYS:
        builder = MMapIndexedDatasetBuilder(str(directory / f"train.{name}.bin"), dtype=np.int32)
        for number, (lengths, labels) in enumerate(SENTENCES):
            ends = np.cumsum(lengths)
            rows = {"tokens": 10 * (number + 1) + np.arange(ends[-1] + num_behind), "label": np.array(labels)}
            rows |= {"word_start": ends - lengths, "word_end": ends}
            builder.add_item(torch.from_numpy(np.asarray(rows[name])))
        builder.finalize(str(directory / f"train.{name}.idx"))
    return directory


def load(directory, max_tokens: int, **settings) -> TaggedSentences:
    return TaggedSentences(directory, "train", NUM_LABELS, max_tokens, **settings)


# Tokens -> the words that remain, counted by hand: pieces and two special tokens.
KEPT = {9: [3, 1, 2], 8: [3, 1, 1], 7: [2, 1, 0], 5: [2, 1, 0], 4: [1, 1, 0], 3: [0, 1, 0]}


@pytest.mark.parametrize("max_tokens", KEPT)
def test_sentences_are_cut_at_word_boundaries(directory, max_tokens):
    data = load(directory, max_tokens)
    kept = KEPT[max_tokens]
    assert [len(data[index]["positions"]) for index in range(3)] == kept
    assert data.cut_words == 6 - sum(kept)
    assert data.cut_sentences == sum(number < len(labels) for number, (_, labels) in zip(kept, SENTENCES, strict=True))
    for index, (lengths, labels) in enumerate(SENTENCES):
        item = data[index]
        length = sum(lengths[: kept[index]])
        pieces = [10 * (index + 1) + offset for offset in range(length)]
        assert item["tokens"].tolist() == [0, *pieces, 2]
        assert len(item["tokens"]) == data.sizes[index] <= max_tokens
        firsts = [1 + sum(lengths[:word]) for word in range(kept[index])]
        assert item["positions"].tolist() == firsts
        assert item["last_positions"].tolist() == [sum(lengths[: word + 1]) for word in range(kept[index])]
        assert item["labels"] == labels


def test_pieces_behind_the_last_word_are_kept_where_they_fit(tmp_path):
    write_files(tmp_path, num_behind=1)
    for max_tokens in (9, 8):
        assert load(tmp_path, max_tokens)[0]["tokens"].tolist()[1:-1] == list(range(10, 8 + max_tokens))
    assert load(tmp_path, 8).cut_words == 1, "of the third sentence"


def test_training_leaves_out_sentences_without_a_word(directory):
    data = load(directory, 4, training=True, seed=5)
    assert len(data) == 2
    assert sorted(data.ordered_indices()) == [0, 1]
    assert (data.cut_words, data.num_words) == (4, 6)
    assert "4 words at the ends of 2 sentences are cut" in data.describe()
    assert "cut" not in load(directory, 9).describe()


def test_batches_are_padded(directory):
    data = load(directory, 7)
    batch = data.collater([data[0], data[1], data[2]])
    assert batch["net_input"]["src_tokens"].tolist() == [[0, 10, 11, 12, 2], [0, 20, 2, 1, 1], [0, 2, 1, 1, 1]]
    assert batch["net_input"]["word_positions"].tolist() == [[1, 3], [1, 0], [0, 0]]
    assert batch["target"].tolist() == [[0, 1], [1, NO_LABEL], [NO_LABEL, NO_LABEL]]
    assert batch["labels"] == [[0, 1, 2], [1], [2, 0]]
    assert (batch["nwords"], batch["ntokens"], batch["nsentences"], batch["first_id"]) == (3, 10, 3, 0)
    assert data.collater([data[2]])["target"].tolist() == [[NO_LABEL]]
    assert data.collater([]) == {}


def test_a_length_without_room_for_a_word_is_refused(directory):
    with pytest.raises(UserError, match="all first words are longer than 0 pieces"):
        load(directory, 2, training=True)
