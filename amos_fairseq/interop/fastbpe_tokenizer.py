"""fastBPE on words split by BERT's basic rules: the base setting of AMOS (section 4), uncased, 32,768 pieces.

Codes and pieces have fastBPE's own format (``first second count`` a line; ``lo@@ w`` for a split word), so its tools
read them. The `tokenizers` library applies them here, as the fastBPE package needs a compiler to install.
"""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.interop.piece_spelling import unspell_piece
from amos_fairseq.interop.tokenizer_base import DICTIONARY_FILE, Tokenizer, read_dictionary_symbols, read_model_file

END_OF_WORD = "</w>"
CONTINUED = "@@"
_UNKNOWN = "<unk>"


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

    def __init__(self, vocabulary: List[str], codes: bytes, cased: bool) -> None:
        """``vocabulary``: pieces as fastBPE writes them; ``codes``: its file. ``ValueError`` where they disagree."""
        self._normalizer, pre_tokenizer = basic_rules(cased)
        ids = {bpe_piece(piece): index for index, piece in enumerate(vocabulary)}
        merges = [_merge_of_line(line) for line in codes.decode("utf-8").split("\n") if line]
        ids.setdefault(_UNKNOWN, len(vocabulary))
        try:
            # Without fuse_unk each unknown character is a piece of its own, as in fastBPE.
            model = models.BPE(ids, merges, unk_token=_UNKNOWN, end_of_word_suffix=END_OF_WORD, fuse_unk=False)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizer
        self._unknown_id = ids[_UNKNOWN]
        super().__init__(vocabulary, cased, codes)
        self._symbol_of_id = self.dictionary_symbols

    @classmethod
    def from_files(cls, directory: Path, settings: Dict[str, Any]) -> "FastBPETokenizer":
        path = directory / cls.model_file
        codes = read_model_file(path)
        vocabulary = [unspell_piece(symbol) for symbol in read_dictionary_symbols(directory / DICTIONARY_FILE)]
        try:
            return cls(vocabulary, codes, settings["cased"])
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: {error}") from error
        except ValueError as error:
            raise UserError(
                f"{directory / DICTIONARY_FILE} does not match {path}: {error}; take both files from the same run"
            ) from error

    def encode_lines(self, lines: List[str]) -> List[List[str]]:
        treated = [self._normalizer.normalize_str(line) for line in lines]
        encodings = self._bpe.encode_batch(treated, add_special_tokens=False)
        return [self._symbols(line, encoding) for line, encoding in zip(treated, encodings, strict=True)]

    def decode(self, pieces: List[str]) -> str:
        joined = " ".join(unspell_piece(piece) for piece in pieces) + " "
        return joined.replace(CONTINUED + " ", "").rstrip(" ")

    def _symbols(self, line: str, encoding: tokenizers.Encoding) -> List[str]:
        ids = encoding.ids
        if self._unknown_id not in ids:
            symbol_of_id = self._symbol_of_id
            return [symbol_of_id[index] for index in ids]
        words = [*encoding.word_ids, None]
        symbols = []
        for position, index in enumerate(ids):
            if index != self._unknown_id:
                symbols.append(self._symbol_of_id[index])
                continue
            start, end = encoding.offsets[position]
            continued = words[position] == words[position + 1]
            symbols.append(self._spellings[line[start:end] + (CONTINUED if continued else "")])
        return symbols


def _merge_of_line(line: str) -> Tuple[str, str]:
    fields = line.split(" ")
    if len(fields) != 3:
        raise ValueError(f"expected 'first second count', got {line[:60]!r}")
    return fields[0], fields[1]
