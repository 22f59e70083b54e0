"""What ``amos_fairseq.load`` cuts and what it refuses."""

import pytest
import torch
from saved_models import write_save_dir

import amos_fairseq
from amos_fairseq.checkpoints.encoder import truncated_lengths
from amos_fairseq.errors import UserError


@pytest.fixture(scope="module")
def save_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    write_save_dir(directory)
    return directory


@pytest.fixture(scope="module")
def encoder(save_dir):
    return amos_fairseq.load(save_dir)


def test_length_limit(encoder):
    """80 tokens: refused, or cut so that the row still ends in ``</s>`` and begins as the whole text does."""
    long, short = "the end " * 60, "the lazy dog"
    whole = encoder.loaded.tokens(long)
    eos = encoder.loaded.dictionary.eos()
    with pytest.raises(UserError, match=rf"text 2 has {len(whole)} tokens, the encoder takes 80: .*truncate=True"):
        encoder([short, long])
    single = encoder([long], truncate=True).tokens[0]
    assert single.tolist() == [*whole[:79].tolist(), eos]
    assert torch.equal(encoder([short], truncate=True).tokens, encoder([short]).tokens)
    pair = encoder([(short, long)], truncate=True).tokens[0].tolist()
    kept = encoder.loaded.tokens(short).tolist()
    assert len(pair) == 80
    assert pair == [*kept, *whole[1 : 80 - len(kept)].tolist(), eos]
    assert len(next(encoder.stream([(long, long)], truncate=True)).tokens[0]) == 80


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([3, 4], 10, [3, 4]),
        ([3, 4], 6, [3, 3]),
        ([3, 4], 5, [3, 2]),
        ([9, 2], 6, [4, 2]),
        ([1, 9], 2, [1, 1]),
        ([8], 5, [5]),
    ],
)
def test_the_longer_text_is_cut_first(lengths, limit, expected):
    """As ``longest_first`` of Hugging Face: one token at a time, of equals from the second."""
    assert truncated_lengths(lengths, limit) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "there is no text to encode"),
        (["the end", " \n"], "text 2: the text is empty"),
        (["the end", ("the end", "")], "text 2: the text is empty"),
        ([7], "text 1: expected a string or a pair of strings, got 7"),
        ([("a", "b", "c")], "text 1: expected a string or a pair"),
    ],
)
def test_invalid_texts_are_refused(encoder, texts, message):
    with pytest.raises(UserError, match=message):
        encoder(texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cuda:99"}, "device cuda:99 cannot be used"),
        ({"device": "abacus"}, "device abacus cannot be used"),
        ({"dtype": torch.int64}, r"dtype torch\.int64 is not supported"),
        ({"batch_size": 0}, "batch_size 0 is too small"),
    ],
)
def test_unusable_settings_are_refused(save_dir, arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        amos_fairseq.load(save_dir, **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("section", ["task", "model"])
def test_checkpoint_without_settings_is_refused(save_dir, tmp_path, section):
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    del state["cfg"][section]
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=r"checkpoint\.pt does not say what was trained"):
        amos_fairseq.load(tmp_path / "checkpoint.pt", save_dir / "tokenizer")
