"""The tokenizer of the released AMOS checkpoint: its normalization, SentencePiece, and a dictionary of its own."""

from pathlib import Path
from typing import Any

import sentencepiece

from amos_fairseq.errors import UserError
from amos_fairseq.files import DICTIONARY_FILE
from amos_fairseq.text.tokenization.standalone import normalize, text_of, without_lone_marks
from amos_fairseq.text.tokenization.tokenizer import COPY_AGAIN, Tokenizer, read_dictionary_symbols, spell_piece
from amos_fairseq.text.tokenization.word_pieces import AlignedPiece, unspell_piece
from amos_fairseq.untrusted import read_bytes


class MicrosoftAmosTokenizer(Tokenizer):
    """Pieces of ``sp.model`` on normalized text, without lone word marks at the end or before punctuation.

    The vocabulary and its order are those of ``dict.txt``, not of the model: a piece that it does not list is ``<unk>``. As
    everywhere in this package, and unlike in the release, a text that spells a special symbol does not become that symbol.
    """

    kind = "microsoft_amos"
    model_file = "sp.model"

    def __init__(self, model: bytes, vocabulary: list[str]) -> None:
        """``model``: a serialized SentencePiece model; raises ``RuntimeError`` for anything else."""
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        super().__init__(vocabulary, cased=True, model=model)

    @classmethod
    def from_files(cls, directory: Path, settings: dict[str, Any]) -> "MicrosoftAmosTokenizer":
        symbols = read_dictionary_symbols(directory / DICTIONARY_FILE)
        return cls._build(directory, [unspell_piece(symbol) for symbol in symbols])

    @classmethod
    def from_release(cls, directory: Path) -> "MicrosoftAmosTokenizer":
        """Read the two files of the release, which come without settings."""
        return cls._build(directory, read_dictionary_symbols(directory / DICTIONARY_FILE))

    @classmethod
    def _build(cls, directory: Path, vocabulary: list[str]) -> "MicrosoftAmosTokenizer":
        path = directory / cls.model_file
        try:
            return cls(read_bytes(path, COPY_AGAIN), vocabulary)
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model: {error}") from error

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        encoded = self._processor.encode(list(map(self.normalize, lines)), out_type=str, num_threads=1)
        return [[spell_piece(pieces[index]) for index in without_lone_marks(pieces)] for pieces in encoded]

    def normalize(self, text: str) -> str:
        return text_of(normalize(text))

    def align(self, line: str) -> list[AlignedPiece]:
        characters = normalize(line)
        encoded = self._processor.encode(text_of(characters), return_type="offset_mapping")
        pieces = encoded["pieces"]
        # Pieces without characters of their own may begin after the last character: at the end of the line.
        starts = [character.start for character in characters] + [len(line)]
        ends = [0] + [character.end for character in characters]
        aligned = []
        for index in without_lone_marks(pieces):
            start, end = encoded["offsets"][index]
            aligned.append((spell_piece(pieces[index]), starts[start], max(starts[start], ends[end])))
        return aligned

    def decode(self, pieces: list[str]) -> str:
        return self._processor.decode_pieces([unspell_piece(piece) for piece in pieces])
