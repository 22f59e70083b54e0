"""What every tokenizer of this package can do, whatever library it stands on."""

import abc
import functools
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Tuple, Union

from amos_fairseq.data.fingerprint import directory_sha256
from amos_fairseq.data.vocabulary import DICTIONARY_FILE, SETTINGS_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.interop.piece_spelling import Spellings


class Tokenizer(abc.ABC):
    """One line of text to pieces in the spelling of ``dict.txt``, and back.

    ``encode`` is the only place where text is treated (lower-cased, normalised, split): preprocessing, fine-tuning,
    ``load`` and ``export`` all call it. What a text contains never becomes a special symbol, even where it spells
    ``<mask>`` or ``</s>``. A piece that is not in ``dict.txt`` keeps its surface, and fairseq's dictionary makes
    ``<unk>`` of it.
    """

    kind: ClassVar[str]
    model_file: ClassVar[str]

    def __init__(self, vocabulary: List[str], cased: bool, model: bytes) -> None:
        self.cased = cased
        self._model = model
        self._spellings = Spellings(vocabulary)
        self.dictionary_symbols: List[str] = list(self._spellings.values())

    @classmethod
    @abc.abstractmethod
    def from_files(cls, directory: Path, settings: Dict[str, Any]) -> "Tokenizer":
        """Read the model file of ``directory``; :class:`UserError` where it is missing or broken."""

    @abc.abstractmethod
    def encode_lines(self, lines: List[str]) -> List[List[str]]:
        """Pieces of each line, in dictionary spelling. Faster than one line at a time, with the same result."""

    @abc.abstractmethod
    def decode(self, pieces: List[str]) -> str:
        """The text, as treated, that ``encode`` made ``pieces`` of."""

    @abc.abstractmethod
    def encode_with_offsets(self, line: str) -> List[Tuple[str, int, int]]:
        """``(piece, start, end)``: the pieces of ``encode``, each with the characters that it stands for.

        ``[start, end)`` counts characters of ``line`` as it was given, before any treatment. Spans have no spaces at
        their ends and begin in ascending order; a piece that stands for no character (a lone mark of a word) has an
        empty one. Pieces of one character (its bytes, the parts of a ligature) share it. Every character is in a span
        except spaces and what treatment removes.
        """

    def encode(self, line: str) -> List[str]:
        """Pieces of one line, in dictionary spelling."""
        return self.encode_lines([line])[0]

    @property
    def model(self) -> bytes:
        """The content of the model file."""
        return self._model

    def settings(self) -> Dict[str, Any]:
        """The content of ``tokenizer.settings.json``."""
        return {"kind": self.kind, "cased": self.cased}

    def save(self, directory: Union[str, Path]) -> None:
        """Write settings, model file and ``dict.txt`` into ``directory``; each file is whole or absent."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(self.settings(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        # Counts order a dictionary that is built from text; this one has the order of the tokenizer, so all are 1.
        dictionary = "".join(f"{symbol} 1\n" for symbol in self.dictionary_symbols)
        # The settings come last: a directory that has them is complete.
        for name, content in (
            (self.model_file, self._model),
            (DICTIONARY_FILE, dictionary.encode("utf-8")),
            (SETTINGS_FILE, settings.encode("utf-8")),
        ):
            with whole_file(str(directory / name)) as unfinished:
                Path(unfinished).write_bytes(content)

    @functools.cached_property
    def sha256(self) -> str:
        """``directory_sha256`` of what :meth:`save` writes, wherever this tokenizer was read from."""
        with tempfile.TemporaryDirectory() as directory:
            self.save(directory)
            return directory_sha256(directory)

    def check_dictionary(self, path: Path) -> None:
        """:class:`UserError` where ``path`` does not list exactly this tokenizer's pieces, in its order."""
        symbols = read_dictionary_symbols(path)
        if symbols != self.dictionary_symbols:
            shared = zip(symbols, self.dictionary_symbols, strict=False)
            line = next((i for i, (a, b) in enumerate(shared, 1) if a != b), 1 + min(len(symbols), len(self)))
            raise UserError(
                f"{path} does not match the tokenizer beside it: they differ from line {line} on ({len(symbols)} and "
                f"{len(self)} pieces); take both files from the same run of prepare.sh"
            )

    def __len__(self) -> int:
        """Number of pieces in ``dict.txt``: fairseq's own symbols and ``<mask>`` come on top."""
        return len(self.dictionary_symbols)


def read_dictionary_symbols(path: Path) -> List[str]:
    """First column of a fairseq ``dict.txt``; :class:`UserError` where it is missing or is none."""
    try:
        # Not splitlines(): it also splits at characters that fairseq leaves alone.
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: the dictionary belongs to the tokenizer, copy the whole directory"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    symbols = []
    for number, line in enumerate(lines, 1):
        symbol, _, count = line.rpartition(" ")
        if not symbol or not count.isdigit():
            raise UserError(f"{path}, line {number}: expected 'piece count', got {line[:60]!r}")
        symbols.append(symbol)
    return symbols


def read_model_file(path: Path) -> bytes:
    """Bytes of a tokenizer's model file; :class:`UserError` where it is missing or empty."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give the whole tokenizer directory that prepare.sh wrote") from None
    if not content:
        raise UserError(f"{path} is empty: copy the tokenizer directory again")
    return content
