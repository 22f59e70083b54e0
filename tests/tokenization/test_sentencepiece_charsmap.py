"""Our reader of SentencePiece's table of rules against SentencePiece's own normalizer."""

import random

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

from amos_fairseq.errors import UserError
from amos_fairseq.tokenization import sentencepiece_charsmap
from amos_fairseq.tokenization.sentencepiece_charsmap import exact_normalizer, read_rules
from tests.tokenization.test_fast_tokenizer import ALPHABETS, random_texts, sentencepiece_of

# A few letters, among them some that rules for several characters produce.
ALPHABET = set("abcdefghijklmnopqrstuvwxyzé ầ\u0301가각 ")
ALL_LETTERS = [*sorted(ALPHABET), "\u0323", "\u0302"]


@pytest.fixture(scope="module", params=["nmt_nfkc", "nmt_nfkc_cf"])
def rule_name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def charsmap(rule_name) -> bytes:
    tokenizer = sentencepiece_of(["a b c"] * 10, vocab_size=5, normalization_rule_name=rule_name)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(tokenizer.model)
    return proto.normalizer_spec.precompiled_charsmap


def reference(rule_name: str) -> sentencepiece.SentencePieceNormalizer:
    return sentencepiece.SentencePieceNormalizer(
        rule_name=rule_name, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


def test_rules_are_those_that_sentencepiece_applies(rule_name, charsmap):
    rules = read_rules(charsmap)
    assert len(rules) > 200_000
    normalize = reference(rule_name).normalize
    for source, target in random.Random(0).sample(sorted(rules.items()), 20_000):
        assert normalize(source) == target, ascii(source)
    for character in map(chr, range(0x20, 0x3000)):
        assert normalize(character) == rules.get(character, character), ascii(character)


def test_steps_normalize_like_sentencepiece(rule_name, charsmap):
    """Up to unknown characters, which share one id: a run of them is written as one."""
    steps = normalizers.Sequence(exact_normalizer(charsmap, ALPHABET))
    normalize = reference(rule_name).normalize
    rules = sorted(source for source in read_rules(charsmap) if len(source) > 1)
    texts = [text for alphabet in ALPHABETS.values() for text in random_texts(alphabet)]
    draw = random.Random(0)
    texts += ["".join(draw.choice(draw.choice([rules, ALL_LETTERS])) for _ in range(6)) for _ in range(2000)]
    for text in texts:
        assert in_vocabulary(steps.normalize_str(text)) == in_vocabulary(normalize(text)), ascii(text)


def in_vocabulary(text: str) -> str:
    """The text with unknown characters replaced by "?". Spaces at the ends are removed by a later step."""
    known = "".join(character if character in ALPHABET else "?" for character in text)
    while "??" in known:
        known = known.replace("??", "?")
    return known.strip(" ")


def test_english_needs_few_steps(charsmap):
    assert len(exact_normalizer(charsmap, set("abcdefghijklmnopqrstuvwxyzéèñü ."))) < 40


def test_no_rules_are_no_steps():
    assert exact_normalizer(b"", ALPHABET) == []


def test_rules_that_would_apply_twice_are_refused(charsmap, monkeypatch):
    monkeypatch.setattr(sentencepiece_charsmap, "read_rules", lambda _: {"a": "b", "b": "c"})
    with pytest.raises(UserError, match=r"normalizes 'a' to 'b', which it would normalize again"):
        exact_normalizer(charsmap, ALPHABET)
