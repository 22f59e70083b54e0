"""fastBPE on words split by BERT's basic rules: the base setting of AMOS (section 4), uncased, 32,768 pieces.

Codes and pieces have fastBPE's own format (``first second count`` a line; ``lo@@ w`` for a split word), so its tools can read
them. The `tokenizers` library applies them, because the fastBPE package needs a compiler to install.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from amos_fairseq.data.vocabulary import DICTIONARY_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.tokenizer import (
    UNK,
    AlignedPiece,
    Tokenizer,
    read_dictionary_symbols,
    read_model_file,
    tidy_spans,
    unspell_piece,
)

END_OF_WORD = "</w>"
CONTINUED = "@@"
# Limits of the cache of encoded words: its memory is bounded for any text.
_CACHE_SIZE = 1 << 17
_LONGEST_CACHED = 64


def basic_rules(cased: bool) -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    """BERT's basic tokenization: control characters removed, spaces around CJK, split at spaces and punctuation.

    Uncased text is lower-cased and loses its accents (NFD, combining marks removed); cased text keeps both and is not
    normalized otherwise.
    """
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=not cased, lowercase=not cased
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()


def fastbpe_piece(piece: str) -> str:
    """Map ``low</w>`` to ``low`` and ``lo`` to ``lo@@``.

    Punctuation is always a word of its own, so ``@`` is never part of a longer piece.
    """
    return piece[: -len(END_OF_WORD)] if piece.endswith(END_OF_WORD) else piece + CONTINUED


def bpe_piece(piece: str) -> str:
    """The inverse of :func:`fastbpe_piece`."""
    return piece[: -len(CONTINUED)] if piece.endswith(CONTINUED) else piece + END_OF_WORD


def bpe_model(vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str) -> models.BPE:
    """Return the library's model. Without ``fuse_unk`` each unknown character is a token of its own, as in fastBPE."""
    return models.BPE(vocabulary, merges, unk_token=unknown, end_of_word_suffix=END_OF_WORD, fuse_unk=False)


def read_merges(codes: bytes) -> list[tuple[str, str]]:
    """Return the merges in a file of codes, in their order; raise ``ValueError`` if a line is not a code."""
    return [_merge_of_line(line) for line in codes.decode("utf-8").split("\n") if line]


def _merge_of_line(line: str) -> tuple[str, str]:
    fields = line.split(" ")
    if len(fields) != 3:
        raise ValueError(f"expected 'first second count', got {line[:60]!r}")
    return fields[0], fields[1]


class FastBPETokenizer(Tokenizer):
    """BPE in fastBPE's format. Normalized text is the words of BERT's basic rules with one space between them."""

    kind = "fastbpe"
    model_file = "bpe.codes"

    def __init__(self, characters: Iterable[str], codes: bytes, cased: bool) -> None:
        """Build the vocabulary: the characters, sorted, then the results of the merges, in their order.

        Args:
            characters: pieces of one character: ``x`` inside a word, ``x</w>`` at its end.
            codes: content of a file of fastBPE.
            cased: keep case and accents.

        Raises:
            ValueError: a code needs a character that is not in ``characters``.
        """
        self._normalizer, pre_tokenizer = basic_rules(cased)
        merges = read_merges(codes)
        inside_first = sorted(characters, key=lambda piece: (piece.endswith(END_OF_WORD), piece))
        # Two codes may produce the same piece; the first one determines its id.
        pieces = list(dict.fromkeys([*inside_first, *(first + second for first, second in merges)]))
        ids = {piece: index for index, piece in enumerate(pieces)}
        vocabulary = [fastbpe_piece(piece) for piece in pieces]
        ids.setdefault(UNK, len(vocabulary))
        try:
            model = bpe_model(ids, merges, UNK)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizer
        # With the normalizer inside, the library's offsets count characters of the text before normalization.
        self._aligning_bpe = tokenizers.Tokenizer(model)
        self._aligning_bpe.normalizer, self._aligning_bpe.pre_tokenizer = self._normalizer, pre_tokenizer
        self._unknown_id = ids[UNK]
        super().__init__(vocabulary, cased, codes)
        self._symbol_of_id = self.dictionary_symbols
        self._encode_cached = functools.lru_cache(_CACHE_SIZE)(self._encode_part)

    @classmethod
    def from_files(cls, directory: Path, settings: dict[str, Any]) -> "FastBPETokenizer":
        path = directory / cls.model_file
        codes = read_model_file(path)
        symbols = read_dictionary_symbols(directory / DICTIONARY_FILE)
        pieces = (bpe_piece(unspell_piece(symbol)) for symbol in symbols)
        characters = [piece for piece in pieces if len(piece.removesuffix(END_OF_WORD)) == 1]
        try:
            return cls(characters, codes, settings["cased"])
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}") from error
        except ValueError as error:
            raise UserError(
                f"{directory / DICTIONARY_FILE} does not match {path}: {error}; take both files from the same run"
            ) from error

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        return [self.encode(line) for line in lines]

    def encode(self, line: str) -> list[str]:
        """Encode each part between spaces by itself: no rule and no merge crosses a space, so parts can be cached."""
        symbols: list[str] = []
        for part in line.split(" "):
            symbols += self._encode_cached(part) if len(part) <= _LONGEST_CACHED else self._encode_part(part)
        return symbols

    def encode_with_offsets(self, line: str) -> list[AlignedPiece]:
        aligned, begin = [], 0
        for part in line.split(" "):
            spans = self._aligning_bpe.encode(part, add_special_tokens=False).offsets
            for piece, (start, end) in zip(self._encode_part(part), spans, strict=True):
                aligned.append((piece, begin + start, begin + end))
            begin += len(part) + 1
        return tidy_spans(line, aligned)

    def decode(self, pieces: list[str]) -> str:
        joined = " ".join(unspell_piece(piece) for piece in pieces) + " "
        return joined.replace(CONTINUED + " ", "").rstrip(" ")

    def _encode_part(self, part: str) -> list[str]:
        normalized = self._normalizer.normalize_str(part)
        encoding = self._bpe.encode(normalized, add_special_tokens=False)
        ids, words = encoding.ids, [*encoding.word_ids, None]
        return [
            self._symbol_of_id[index]
            if index != self._unknown_id
            else self._surface(normalized, encoding.offsets[position], words[position] == words[position + 1])
            for position, index in enumerate(ids)
        ]

    def _surface(self, normalized: str, offsets: tuple[int, int], continued: bool) -> str:
        character = normalized[offsets[0] : offsets[1]]
        return self._spellings[character + (CONTINUED if continued else "")]
