"""Learn a vocabulary from the sample: SentencePiece BPE."""

import io
import re
from collections.abc import Iterator, Sequence
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
# The rarest 0.01 % of all characters may have no piece. At 0.9995, SentencePiece's default,
# English books and Wikipedia lose "$", "%" and "/"; 0.9999 takes about 100 characters.
CHARACTER_COVERAGE = 0.9999


def learn_tokenizer(sample: Path, vocab_size: int, cased: bool, protected: Sequence[str] = ()) -> FastTokenizer:
    """Learn exactly ``vocab_size`` pieces, without fairseq's symbols, ``<mask>`` and the ``protected`` tokens."""
    normalizer = sentencepiece_rules(cased)
    return from_sentencepiece(train_sentencepiece(sample, vocab_size, normalizer, protected), normalizer, protected)


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
    sample: Path, vocab_size: int, normalizer: normalizers.Normalizer, protected: Sequence[str] = ()
) -> bytes:
    """Return a SentencePiece model of ``vocab_size`` pieces and ``<unk>``, learned from the normalized sample."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(
                part
                for line in sample_lines(sample, protected)
                for part in cut_long_line(normalizer.normalize_str(line))
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
            largest = int(limit.group(1)) - 1
            raise UserError(
                f"--vocab-size {vocab_size} is larger than the text allows: give at most {largest}, or more text"
            ) from error
        if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            smallest = int(limit.group(1)) - 1
            raise UserError(
                f"--vocab-size {vocab_size} leaves no piece for some characters: give at least {smallest}"
            ) from error
        raise UserError(f"no vocabulary can be learned from the text: give text with letters ({error})") from error
    return model.getvalue()
