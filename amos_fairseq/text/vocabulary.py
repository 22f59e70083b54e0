"""Learn a vocabulary by SentencePiece BPE, and convert it to a ``tokenizer.json`` that splits every text into the same pieces.

All later steps use the ``tokenizer.json``. Its ids are the rows of our embedding: ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2,
``<unk>`` 3, pieces from 4 on, ``<mask>`` last. It splits a text at its spaces first, so words can be encoded separately.
"""

import io
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, normalizers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.conversion import NORMAL, UNUSED, library_of_pieces
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.tokenization.tokenizer import SPACE

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
# Sets of SentencePiece's nmt rules, completed: all control characters, and every kind of space. The zero-width non-joiner, a
# space in these rules, is kept: words of Persian contain it.
_CONTROL = r"[\x00-\x08\x0e-\x1f\x7f\x{80}-\x{84}\x{86}-\x{9f}]"
_OTHER_SPACE = r"[\s\x{200b}\x{200e}\x{200f}\x{2581}\x{feff}\x{fffd}&&[^ ]]"


def learn_tokenizer(sample: Path, vocab_size: int, cased: bool, protected: Sequence[str] = ()) -> FastTokenizer:
    """Learn exactly ``vocab_size`` pieces, without fairseq's symbols, ``<mask>`` and the ``protected`` tokens."""
    normalizer = sentencepiece_rules(cased)
    return from_sentencepiece(train_sentencepiece(sample, vocab_size, normalizer, protected), normalizer, protected)


def choose_characters(counts: Mapping[str, int], vocab_size: int, ascii_characters: Collection[str]) -> set[str]:
    """Return the characters that get a piece: ``ascii_characters``, the most frequent ones that together make up
    ``CHARACTER_COVERAGE`` of the text or occur ``OFTEN``, at most half of the pieces that ASCII leaves, and rarer ones, up to a
    twentieth of all pieces.
    """
    chosen, covered = set(ascii_characters), 0
    few, most = len(chosen) + vocab_size // 20, (len(chosen) + vocab_size) // 2
    needed = CHARACTER_COVERAGE * sum(counts.values())
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= most or (covered >= needed and count < OFTEN and len(chosen) >= few):
            break
        chosen.add(character)
        covered += count
    return chosen


def sample_lines(sample: Path, protected: Sequence[str] = ()) -> Iterator[str]:
    """Yield the paragraphs of the sample without protected tokens; those over ``LONGEST_LINE_BYTES`` are split, if possible at
    a space."""
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
    sample: Path, vocab_size: int, normalizer: normalizers.Normalizer, protected: Sequence[str] = ()
) -> bytes:
    """Return a SentencePiece model of ``vocab_size`` pieces behind ``<unk>`` and a tab, learned from the normalized sample."""
    lines = [normalizer.normalize_str(line) for line in sample_lines(sample, protected)]
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    del counts[" "], counts[_RESERVED]
    chosen = choose_characters(counts, vocab_size, set(normalizer.normalize_str(PRINTABLE_ASCII)))
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
        limit = re.search(r"(size too high.*<=|smaller than required_chars\. \d+ vs) (\d+)", str(error))
        advice = f"give text with letters ({error})"
        if limit is not None:
            bound = "at most" if limit[1].endswith("<=") else "at least"
            advice = f"give {bound} {int(limit[2]) - _NOT_LEARNED}, or another text"
        raise UserError(f"no vocabulary of --vocab-size {vocab_size} can be learned from the text: {advice}") from error
    return model.getvalue()


def sentencepiece_rules(cased: bool) -> normalizers.Normalizer:
    """The normalization of the text that SentencePiece learns from: NFC, no control characters, single spaces.

    Not SentencePiece's NFKC, which changes what a text says: "½" to "1⁄2", "①" to "1", "²" to "2", and Chinese punctuation.
    """
    return normalizers.Sequence(
        [
            # The pre-tokenizer recognizes the beginning of a text by its first character, which must not be removed.
            normalizers.Replace(Regex(rf"\A{_CONTROL}+"), " "),
            normalizers.Replace(Regex(_CONTROL), ""),
            normalizers.NFC(),
            *([] if cased else [normalizers.Lowercase()]),
            normalizers.Replace(Regex(_OTHER_SPACE), " "),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(r" +\z"), ""),  # one at the beginning is SentencePiece's own
        ]
    )


def from_sentencepiece(
    model: bytes, normalizer: normalizers.Normalizer, protected: Sequence[str] = ()
) -> FastTokenizer:
    """Convert a serialized SentencePiece BPE model, which was learned from text with this normalization and has none itself.

    ``protected``: tokens that come behind its pieces.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    pieces = [piece for piece in proto.pieces if piece.type == NORMAL]
    names = {piece.piece for piece in pieces}
    markers = [proto.SentencePiece(piece=token, type=UNUSED) for token in protected if token not in names]
    tokenizer = library_of_pieces(proto, [*pieces, *markers], normalizer)
    return tokenizer.with_protected(protected) if protected else tokenizer
