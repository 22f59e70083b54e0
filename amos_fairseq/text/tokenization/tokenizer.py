"""The base class of all tokenizers: pieces in the spelling of ``dict.txt``, files, offsets into the original text."""

import abc
import functools
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from amos_fairseq.errors import UserError
from amos_fairseq.files import DICTIONARY_FILE, SETTINGS_FILE, directory_sha256, whole_file
from amos_fairseq.inputs.raw_words import join_words
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization.word_pieces import AlignedPiece, pieces_of_words, tidy_spans
from amos_fairseq.untrusted import read_text

BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
SPECIAL_SYMBOLS = (BOS, PAD, EOS, UNK, MASK_SYMBOL)
OF_CORPUS = "dictionary_of_corpus"  # in the settings, where it is
SPACE = "▁"  # how SentencePiece writes a space in pieces

# A backslash that already begins an escape is escaped too; otherwise two pieces would share one spelling.
_MUST_ESCAPE = re.compile(r"\s|\\(?=x\{)")
COPY_AGAIN = "copy the whole tokenizer directory again"


def embedding_symbols(pieces: Iterable[str]) -> list[str]:
    """Return the dictionary of every task of this package, in the order of the embedding."""
    return [BOS, PAD, EOS, UNK, *pieces, MASK_SYMBOL]


def spell_piece(piece: str) -> str:
    r"""Return the spelling of a piece in ``dict.txt`` and in encoded text.

    fairseq splits encoded lines at whitespace. Whitespace inside a piece, and the first character of a piece that equals one of
    fairseq's symbols (text about HTML makes ``<s>`` a frequent word), are therefore written as ``\x{hexadecimal code}``.
    Different pieces have different spellings, which are never empty; ``unspell_piece`` is the inverse.
    """
    if not piece:
        return r"\x{}"
    if piece in SPECIAL_SYMBOLS:
        return _escape(piece[0]) + piece[1:]
    return _MUST_ESCAPE.sub(lambda match: _escape(match.group()), piece)


def _escape(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


class Tokenizer(abc.ABC):
    """Converts one line of text to pieces in the spelling of ``dict.txt``, and back.

    ``encode`` is the only place where text is normalized (lower-cased, split, ...): preprocessing, fine-tuning, ``load`` and
    ``export`` all call it. Text never becomes a special symbol, even where it spells ``<mask>`` or ``</s>``. A piece that is
    not in ``dict.txt`` keeps its surface form, and fairseq's dictionary maps it to ``<unk>``.
    """

    kind: str
    model_file: ClassVar[str]
    # Markers such as [E1]: a text that spells one is that token, and it is special for all objectives.
    protected: Sequence[str] = ()
    can_decode = True
    # The dict.txt of a corpus of fairseq-preprocess, in its own order: a part of the pieces, and other symbols.
    dictionary_of_corpus: bytes | None = None

    def __init__(self, vocabulary: list[str], cased: bool, model: bytes) -> None:
        self.cased = cased
        self.model = model  # the content of the model file
        self.dictionary_symbols = list(map(spell_piece, vocabulary))

    @classmethod
    @abc.abstractmethod
    def from_files(cls, directory: Path, settings: dict[str, Any]) -> "Tokenizer":
        """Read the model file in ``directory``."""

    @abc.abstractmethod
    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        """Return the pieces of each line, in dictionary spelling. Faster than ``encode`` on each, with equal results."""

    @abc.abstractmethod
    def decode(self, pieces: list[str]) -> str:
        """Return the normalized text that ``encode`` split into ``pieces``."""

    @abc.abstractmethod
    def normalize(self, text: str) -> str:
        """Return the text that is split into pieces."""

    @abc.abstractmethod
    def align(self, line: str) -> Iterable[AlignedPiece]:
        """Return the pieces of ``encode`` with the characters that the library gives them."""

    def encode_with_offsets(self, line: str) -> list[AlignedPiece]:
        """Return ``(piece, start, end)``: the pieces of ``encode``, each with the characters of ``line`` that it covers.

        Spans have no spaces at their ends and start in ascending order. A piece that covers no character (a lone word mark) has
        an empty span; pieces that share one character share its span. Only spaces and removed characters are in none.
        """
        return tidy_spans(line, self.align(line))

    def with_protected(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return the tokenizer that also protects ``tokens``, which are pieces of its vocabulary."""
        raise UserError("only tokens of a tokenizer.json can be protected: leave --protect out")

    def finds_special_token(self, line: str) -> bool:
        """Return whether the library would make a special token of a part of the line; here all of it is text."""
        return False

    def encode(self, line: str) -> list[str]:
        """Return the pieces of one line, in dictionary spelling."""
        return self.encode_lines([line])[0]

    def settings(self) -> dict[str, Any]:
        of_corpus = {} if self.dictionary_of_corpus is None else {OF_CORPUS: True}
        return {"kind": self.kind, "cased": self.cased, **of_corpus}

    def use_dictionary_of_corpus(self, path: Path) -> None:
        """Take the symbols of a corpus, in their order, instead of all pieces; a piece that is not among them is ``<unk>``."""
        self.dictionary_symbols, self.dictionary_of_corpus = read_dictionary_symbols(path), path.read_bytes()

    def save(self, directory: str | Path) -> None:
        """Write settings, model file and ``dict.txt`` into ``directory``; each file is written atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self.settings(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        # fairseq sorts a dictionary that it builds from text by count. This one keeps the tokenizer's order, so all are 1.
        dictionary = "".join(f"{symbol} 1\n" for symbol in self.dictionary_symbols).encode("utf-8")
        # The settings are written last: a directory that has them is complete.
        for name, content in (
            (self.model_file, self.model),
            (DICTIONARY_FILE, self.dictionary_of_corpus or dictionary),
            (SETTINGS_FILE, settings.encode("utf-8")),
        ):
            with whole_file(str(directory / name)) as unfinished:
                Path(unfinished).write_bytes(content)

    @property
    def protected_symbols(self) -> list[str]:
        return list(map(spell_piece, self.protected))

    def spells_protected(self, text: str) -> bool:
        return any(token in text for token in self.protected)

    @functools.cached_property
    def embedding_rows(self) -> dict[str, int]:
        """The row of each symbol in the embedding, which is its id in the dictionary of every task of this package."""
        return {symbol: row for row, symbol in enumerate(embedding_symbols(self.dictionary_symbols))}

    def ids_of(self, pieces: Iterable[str]) -> list[int]:
        """Return the rows of pieces in the embedding; a piece that is not in ``dict.txt`` is ``<unk>``."""
        rows = self.embedding_rows
        unknown = rows[UNK]
        return [rows.get(piece, unknown) for piece in pieces]

    def encode_words(
        self, words: Sequence[str], spaces: Sequence[bool] | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of the text of ``join_words``, and for each word the half-open range of its pieces.

        These cover one of its characters; a lone word mark before them covers none. A piece that begins in an earlier word is
        left out if the word has another one, so that the first piece tells words apart where it can. A word of which no piece
        remains (a control character that the tokenizer removes) gets ``<unk>``, in which the exported tokenizer differs: no
        range is empty.
        """
        pieces = self.encode_with_offsets(join_words(words, spaces))
        ids = self.ids_of(piece for piece, _, _ in pieces)
        ranges, absent = pieces_of_words(words, spaces, [span for _, *span in pieces])
        for index in absent:
            ids.insert(index, self.embedding_rows[UNK])
        return ids, ranges

    @functools.cached_property
    def sha256(self) -> str:
        """``directory_sha256`` of the files that ``save`` writes, independent of where the tokenizer was read from."""
        with tempfile.TemporaryDirectory() as directory:
            self.save(directory)
            return directory_sha256(directory)

    def __len__(self) -> int:
        """Return the number of pieces in ``dict.txt``, without fairseq's own symbols and ``<mask>``."""
        return len(self.dictionary_symbols)


def token_ids(pieces: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return token -> id, and fairseq's symbol -> its token: with more brackets if it is also a piece (of a text on HTML)."""
    special_tokens = {}
    for symbol in SPECIAL_SYMBOLS:
        special_tokens[symbol] = symbol
        while special_tokens[symbol] in pieces:
            special_tokens[symbol] = f"<{special_tokens[symbol]}>"
    *first, mask = special_tokens.values()
    return {token: index for index, token in enumerate([*first, *pieces, mask])}, special_tokens


def read_dictionary_symbols(path: Path) -> list[str]:
    # Not splitlines(): it also splits at characters that fairseq does not split at.
    lines = read_text(path, COPY_AGAIN).replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")
    symbols = [line.rpartition(" ")[0] for line in lines if re.fullmatch(r".+ [0-9]+", line, re.DOTALL)]
    if len({*symbols} - {*SPECIAL_SYMBOLS}) < len(lines):
        raise UserError(
            f"{path}: each line needs a piece of its own, none of {' '.join(SPECIAL_SYMBOLS)}, and a number"
        )
    return symbols
