"""Which tokenizers ``amos export`` would refuse, and why."""

import pytest
from tokenizer_text import word_level_directory

from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.exported import export_obstacle, exported_tokenizer, spelled_token_found

WORDS = [f"E{number:03}" for number in range(20)]


def test_every_kind_can_be_exported(tokenizer):
    assert export_obstacle(tokenizer) is None


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({}, None),
        ({"absent": ["[MASK]"]}, None),
        ({"absent": ["[CLS]"]}, "has no token in the role of <s>: name it in special_tokens_map.json"),
        ({"absent": ["[PAD]", "[SEP]"]}, "has no token in the role of <pad>, </s>"),
        ({"added": ["[PAD]", "[CLS]", "[SEP]"]}, "[PAD] was added to the vocabulary later: its id 22 cannot become 1"),
    ],
)
def test_a_tokenizer_of_words(settings, obstacle, tmp_path):
    found = export_obstacle(load_tokenizer(word_level_directory(tmp_path / "words", WORDS, **settings)))
    assert (found is None) if obstacle is None else (obstacle in found)


def test_words_that_spell_a_special_token(tmp_path):
    """Text here, in the exported tokenizer that token: the difference is named, and other texts are compared."""
    tokenizer = load_tokenizer(word_level_directory(tmp_path / "words", WORDS))
    assert tokenizer.finds_special_token("E001 [MASK] E002")
    assert not tokenizer.finds_special_token("E001 x[MASK]x E002")
    assert spelled_token_found(tokenizer) in tokenizer.special_tokens.values()
    assert "<mask>" not in tokenizer.encode("E001 [MASK] E002")
    exported = exported_tokenizer(tokenizer)
    exported.encode_special_tokens = True
    assert "[MASK]" in exported.encode("E001 [MASK] E002").tokens
