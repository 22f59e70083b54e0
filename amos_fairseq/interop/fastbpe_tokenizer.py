"""fastBPE on words split by BERT's basic rules: the base setting of AMOS (section 4), uncased, 32,768 pieces.

Codes and pieces have fastBPE's own format (``first second count`` a line; ``lo@@ w`` for a split word), so its tools
read them. The `tokenizers` library applies them here, as the fastBPE package needs a compiler to install.
"""

import functools
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from amos_fairseq.data.vocabulary import DICTIONARY_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.interop.offsets import tidy_spans
from amos_fairseq.interop.piece_spelling import unspell_piece
from amos_fairseq.interop.tokenizer_base import Tokenizer, read_dictionary_symbols, read_model_file

END_OF_WORD = "</w>"
CONTINUED = "@@"
_UNKNOWN = "<unk>"
# Bounds of the table of encoded words: a constant amount of memory whatever the text.
_REMEMBERED_PARTS = 1 << 17
_LONGEST_REMEMBERED = 64


def basic_rules(cased: bool) -> Tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    """BERT's basic tokenization: control characters out, spaces around CJK, split at spaces and punctuation.

    Uncased text is lower-cased and loses its accents (NFD, combining marks removed); cased text keeps both and is not
    normalised otherwise.
    """
    normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=not cased, lowercase=not cased
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()


def fastbpe_piece(piece: str) -> str:
    """``low</w>`` to ``low``, ``lo`` to ``lo@@``. Punctuation stands alone, so ``@`` is never part of a longer piece."""
    return piece[: -len(END_OF_WORD)] if piece.endswith(END_OF_WORD) else piece + CONTINUED


def bpe_piece(piece: str) -> str:
    """The inverse of :func:`fastbpe_piece`."""
    return piece[: -len(CONTINUED)] if piece.endswith(CONTINUED) else piece + END_OF_WORD


class FastBPETokenizer(Tokenizer):
    """Treated text is the words of BERT's basic rules with one space between them."""

    kind = "fastbpe"
    model_file = "bpe.codes"

    def __init__(self, characters: Iterable[str], codes: bytes, cased: bool) -> None:
        """``codes``: a file of fastBPE; ``characters``: pieces of one character (those inside a word are ``x``, those
        that end one are ``x</w>``). The vocabulary is these, sorted, and then what the codes make, in their order.
        ``ValueError`` where a code needs another character.
        """
        self._normalizer, pre_tokenizer = basic_rules(cased)
        merges = [_merge_of_line(line) for line in codes.decode("utf-8").split("\n") if line]
        inside_first = sorted(characters, key=lambda piece: (piece.endswith(END_OF_WORD), piece))
        # Two codes may make the same piece; the first one numbers it.
        pieces = list(dict.fromkeys([*inside_first, *(first + second for first, second in merges)]))
        ids = {piece: index for index, piece in enumerate(pieces)}
        vocabulary = [fastbpe_piece(piece) for piece in pieces]
        ids.setdefault(_UNKNOWN, len(vocabulary))
        try:
            # Without fuse_unk each unknown character is a piece of its own, as in fastBPE.
            model = models.BPE(ids, merges, unk_token=_UNKNOWN, end_of_word_suffix=END_OF_WORD, fuse_unk=False)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizer
        # With the rules inside, the library counts characters of the text as it was before them.
        self._aligning_bpe = tokenizers.Tokenizer(model)
        self._aligning_bpe.normalizer, self._aligning_bpe.pre_tokenizer = self._normalizer, pre_tokenizer
        self._unknown_id = ids[_UNKNOWN]
        super().__init__(vocabulary, cased, codes)
        self._symbol_of_id = self.dictionary_symbols
        self._remembered = functools.lru_cache(_REMEMBERED_PARTS)(self._encode_part)

    @classmethod
    def from_files(cls, directory: Path, settings: Dict[str, Any]) -> "FastBPETokenizer":
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

    def encode_lines(self, lines: List[str]) -> List[List[str]]:
        return [self.encode(line) for line in lines]

    def encode(self, line: str) -> List[str]:
        """Part by part between spaces, which no rule and no merge crosses: frequent words come from a table."""
        symbols: List[str] = []
        for part in line.split(" "):
            symbols += self._remembered(part) if len(part) <= _LONGEST_REMEMBERED else self._encode_part(part)
        return symbols

    def encode_with_offsets(self, line: str) -> List[Tuple[str, int, int]]:
        aligned, begin = [], 0
        for part in line.split(" "):
            spans = self._aligning_bpe.encode(part, add_special_tokens=False).offsets
            for piece, (start, end) in zip(self._encode_part(part), spans, strict=True):
                aligned.append((piece, begin + start, begin + end))
            begin += len(part) + 1
        return tidy_spans(line, aligned)

    def decode(self, pieces: List[str]) -> str:
        joined = " ".join(unspell_piece(piece) for piece in pieces) + " "
        return joined.replace(CONTINUED + " ", "").rstrip(" ")

    def _encode_part(self, part: str) -> List[str]:
        treated = self._normalizer.normalize_str(part)
        encoding = self._bpe.encode(treated, add_special_tokens=False)
        ids, words = encoding.ids, [*encoding.word_ids, None]
        return [
            self._symbol_of_id[index]
            if index != self._unknown_id
            else self._surface(treated, encoding.offsets[position], words[position] == words[position + 1])
            for position, index in enumerate(ids)
        ]

    def _surface(self, treated: str, offsets: Tuple[int, int], continued: bool) -> str:
        character = treated[offsets[0] : offsets[1]]
        return self._spellings[character + (CONTINUED if continued else "")]


def _merge_of_line(line: str) -> Tuple[str, str]:
    fields = line.split(" ")
    if len(fields) != 3:
        raise ValueError(f"expected 'first second count', got {line[:60]!r}")
    return fields[0], fields[1]
