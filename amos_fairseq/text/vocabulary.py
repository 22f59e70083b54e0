"""Learn a vocabulary from the sample: SentencePiece BPE, or BPE as fastBPE learns it, deterministically."""

import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, trainers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.conversion import (
    END_OF_WORD,
    SPACE,
    basic_rules,
    from_bpe,
    from_sentencepiece,
    sentencepiece_rules,
)
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

# SentencePiece silently skips longer lines (its max_sentence_length).
LONGEST_LINE_BYTES = 4192
# Stored in the model file, so it must not depend on the machine; the pieces do not depend on it.
SENTENCEPIECE_THREADS = 4
# BERT's own limit (the default of the tokenizers library too), unless the coverage needs more.
MOST_CHARACTERS = 1000
# For both types: the rarest 0.01 % of all characters may have no piece. At 0.9995, SentencePiece's default,
# English books and Wikipedia lose "$", "%" and "/"; 0.9999 takes about 100 characters.
CHARACTER_COVERAGE = 0.9999
NO_PIECES = "no vocabulary can be learned from the text: give text with letters"


def learn_tokenizer(sample: Path, bpe: str, vocab_size: int, cased: bool) -> FastTokenizer:
    """Learn ``sentencepiece`` or ``fastbpe`` of exactly ``vocab_size`` pieces, without fairseq's symbols and ``<mask>``."""
    if bpe == "sentencepiece":
        normalizer = sentencepiece_rules(cased)
        return from_sentencepiece(train_sentencepiece(sample, vocab_size, normalizer), normalizer)
    characters, merges, largest = _learn_bpe(sample, cased, vocab_size)
    if largest < vocab_size:
        # A smaller vocabulary may have fewer characters, and then fewer pieces can be merged of them.
        while (found := _learn_bpe(sample, cased, largest)[-1]) < largest:
            largest = found
        raise _too_large(vocab_size, largest)
    return from_bpe(characters, merges, cased)


def sample_lines(sample: Path) -> Iterator[str]:
    """Yield the paragraphs of the sample; those over ``LONGEST_LINE_BYTES`` are split, if possible at a space."""
    with open(sample, encoding="utf-8", newline="\n") as stream:
        for line in stream:
            if paragraph := line.strip():
                yield from cut_long_line(paragraph)


def cut_long_line(line: str, limit: int = LONGEST_LINE_BYTES) -> Iterator[str]:
    """Yield parts of at most ``limit`` bytes of UTF-8 that together contain the line except spaces at the cuts."""
    rest = line.encode("utf-8")
    while len(rest) > limit:
        cut = rest.rfind(b" ", 1, limit + 1)
        if cut == -1:
            cut = limit
            while rest[cut] & 0xC0 == 0x80:  # do not split a character
                cut -= 1
        yield rest[:cut].decode("utf-8")
        rest = rest[cut:].lstrip(b" ")
    if rest:
        yield rest.decode("utf-8")


def train_sentencepiece(sample: Path, vocab_size: int, normalizer: normalizers.Normalizer) -> bytes:
    """Return a SentencePiece model of ``vocab_size`` pieces and ``<unk>``, learned from the normalized sample."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                part for line in sample_lines(sample) for part in cut_long_line(normalizer.normalize_str(line))
            ),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size + 1,  # its <unk> has no line in dict.txt
            normalization_rule_name="identity",
            required_chars=SPACE,
            max_sentence_length=LONGEST_LINE_BYTES,
            character_coverage=CHARACTER_COVERAGE,
            num_threads=SENTENCEPIECE_THREADS,
            # fairseq adds its own.
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            unk_id=0,
            minloglevel=2,
        )
    except RuntimeError as error:
        if limit := re.search(r"size too high .*<= (\d+)", str(error)):
            raise _too_large(vocab_size, int(limit.group(1)) - 1) from error
        if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise _too_small(vocab_size, int(limit.group(1)) - 1) from error
        raise UserError(f"{NO_PIECES} ({error})") from error
    return model.getvalue()


def _learn_bpe(sample: Path, cased: bool, vocab_size: int) -> tuple[list[str], list[tuple[str, str]], int]:
    """Return the characters and merges of a vocabulary, and how many pieces they are: fewer if the text has no more."""
    alphabet, finals = _characters(sample, cased, vocab_size)
    model = json.loads(_train_bpe(sample, cased, vocab_size, alphabet, finals).to_str())["model"]
    return alphabet + finals, [(first, second) for first, second in model["merges"]], len(model["vocab"])


def _characters(sample: Path, cased: bool, vocab_size: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters and, of these, the ones that end a word, both sorted: the order of the library
    differs between runs. At most a third of the vocabulary, but always those that ``CHARACTER_COVERAGE`` needs."""
    normalizer, _ = basic_rules(cased)
    counts: dict[str, int] = Counter()
    for line in sample_lines(sample):
        counts.update(normalizer.normalize_str(line))
    pieces = _train_bpe(sample, cased, 0, [], []).get_vocab()
    by_frequency = sorted((p for p in pieces if len(p) == 1), key=lambda character: (-counts[character], character))
    if not by_frequency:
        raise UserError(NO_PIECES)
    covered = list(itertools.accumulate(counts[character] for character in by_frequency))
    needed = 1 + sum(total < CHARACTER_COVERAGE * covered[-1] for total in covered)
    alphabet = set(by_frequency[: max(needed, min(MOST_CHARACTERS, vocab_size // 3))])
    finals = [p for p in pieces if p.endswith(END_OF_WORD) and p[: -len(END_OF_WORD)] in alphabet]
    if len(alphabet) + len(finals) > vocab_size:
        raise _too_small(vocab_size, len(alphabet) + len(finals))
    return sorted(alphabet), sorted(finals)


def _train_bpe(
    sample: Path, cased: bool, vocab_size: int, alphabet: list[str], finals: list[str]
) -> tokenizers.Tokenizer:
    """Return the learner after training. An empty alphabet allows every character."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer, learner.pre_tokenizer = basic_rules(cased)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        end_of_word_suffix=END_OF_WORD,
        special_tokens=alphabet + finals,  # these get the first ids, in this order
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet) or sys.maxunicode,
        show_progress=False,
    )
    learner.train_from_iterator(sample_lines(sample), trainer)
    return learner


def _too_large(vocab_size: int, largest: int) -> UserError:
    return UserError(f"--vocab-size {vocab_size} is larger than the text allows: give at most {largest}, or more text")


def _too_small(vocab_size: int, smallest: int) -> UserError:
    return UserError(f"--vocab-size {vocab_size} leaves no piece for some characters: give at least {smallest}")
