"""Learn a vocabulary from the sample: SentencePiece BPE."""

import io
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import sentencepiece
from tokenizers import normalizers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.conversion import SPACE, from_sentencepiece, sentencepiece_rules
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

# SentencePiece silently skips longer lines (its max_sentence_length).
LONGEST_LINE_BYTES = 4192
# Stored in the model file, so it must not depend on the machine; the pieces do not depend on it.
SENTENCEPIECE_THREADS = 4
# Beside printable ASCII, characters have a piece that make up this share of the text (what Chinese, with thousands of rare
# characters, needs) or occur so often (of 1.5 MB of Spanish the share alone leaves out "¿" and "ü"), and of the rarer ones as
# many as fit into a twentieth of the pieces ("¡" occurs once in that text).
CHARACTER_COVERAGE, OFTEN = 0.9999, 5
PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_NO_PIECE = "\t"  # in the place of a character without a piece: a symbol of the user's, which no learned piece contains
_RESERVED = "\u2585"  # SentencePiece's own symbol for this, which it miscounts in a text
_NOT_LEARNED = 2  # of its pieces: <unk> and _NO_PIECE


def learn_tokenizer(
    sample: Path, vocab_size: int, cased: bool, protected: Sequence[str] = (), character_coverage: float | None = None
) -> FastTokenizer:
    """Learn exactly ``vocab_size`` pieces, without fairseq's symbols, ``<mask>`` and the ``protected`` tokens."""
    normalizer = sentencepiece_rules(cased)
    model = train_sentencepiece(sample, vocab_size, normalizer, protected, character_coverage)
    return from_sentencepiece(model, normalizer, protected)


def choose_characters(
    counts: Mapping[str, int], vocab_size: int, ascii_characters: Collection[str], coverage: float | None = None
) -> set[str]:
    """Return the characters that get a piece: the most frequent ones that together make up ``coverage`` of the text.

    None: ``ascii_characters``, those that make up ``CHARACTER_COVERAGE`` or occur ``OFTEN``, at most half of the pieces that
    ASCII leaves, and rarer ones, up to a twentieth of all pieces.
    """
    chosen, often, few, most = set(), math.inf, 0, math.inf
    if coverage is None:
        chosen, coverage, often = set(ascii_characters), CHARACTER_COVERAGE, OFTEN
        few, most = len(chosen) + vocab_size // 20, (len(chosen) + vocab_size) // 2
    needed, covered = coverage * sum(counts.values()), 0
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= most or (covered >= needed and count < often and len(chosen) >= few):
            break
        chosen.add(character)
        covered += count
    return chosen


def sample_lines(sample: Path, protected: Sequence[str] = ()) -> Iterator[str]:
    """Yield the paragraphs of the sample, without protected tokens; those over ``LONGEST_LINE_BYTES`` are split, if possible
    at a space."""
    with open(sample, encoding="utf-8", newline="\n") as stream:
        for line in stream:
            for token in protected:
                line = line.replace(token, " ")
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


def train_sentencepiece(
    sample: Path,
    vocab_size: int,
    normalizer: normalizers.Normalizer,
    protected: Sequence[str] = (),
    character_coverage: float | None = None,
) -> bytes:
    """Return a SentencePiece model of ``vocab_size`` pieces behind ``<unk>`` and a tab, learned from the normalized sample."""
    lines = [normalizer.normalize_str(line) for line in sample_lines(sample, protected)]
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    del counts[" "], counts[_RESERVED]
    ascii_characters = set(normalizer.normalize_str(PRINTABLE_ASCII))
    chosen = choose_characters(counts, vocab_size, ascii_characters, character_coverage)
    others = re.escape("".join({*counts, _RESERVED} - chosen))
    without_others = (re.sub(f"[{others}]", _NO_PIECE, line) for line in lines)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for line in without_others for part in cut_long_line(line)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size + _NOT_LEARNED,
            normalization_rule_name="identity",
            # All characters that are left. It would ignore required_chars that make up the coverage by themselves.
            character_coverage=1.0,
            required_chars="".join(sorted({SPACE, *chosen} - counts.keys())),
            user_defined_symbols=[_NO_PIECE],
            max_sentence_length=LONGEST_LINE_BYTES,
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
            largest = int(limit.group(1)) - _NOT_LEARNED
            raise UserError(
                f"--vocab-size {vocab_size} is larger than the text allows: give at most {largest}, or more text"
            ) from error
        if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            smallest = int(limit.group(1)) - _NOT_LEARNED
            unless = ", or --character-coverage 1 if the text needs few of ASCII" if character_coverage is None else ""
            raise UserError(
                f"--vocab-size {vocab_size} leaves no piece for some characters: give at least {smallest}{unless}"
            ) from error
        raise UserError(f"no vocabulary can be learned from the text: give text with letters ({error})") from error
    return model.getvalue()
