"""The tokenizer of the released AMOS checkpoint: its treatment of text, SentencePiece, and a dictionary of its own."""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import sentencepiece

from amos_fairseq.data.vocabulary import DICTIONARY_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.interop.microsoft_text import places_kept, text_of, treat
from amos_fairseq.interop.offsets import tidy_spans
from amos_fairseq.interop.piece_spelling import SPECIAL_SYMBOLS, unspell_piece
from amos_fairseq.interop.tokenizer_base import Tokenizer, read_dictionary_symbols, read_model_file


class MicrosoftAmosTokenizer(Tokenizer):
    """Pieces of ``sp.model`` after :func:`~amos_fairseq.interop.microsoft_text.treat`; a lone mark of a word at the end, or
    before punctuation, is dropped.

    The vocabulary is ``dict.txt``'s, in its order, not the model's: a piece that it does not list is ``<unk>``. As
    everywhere in this package, and unlike in the release, a text that spells a special symbol does not become one.
    """

    kind = "microsoft_amos"
    model_file = "sp.model"

    def __init__(self, model: bytes, vocabulary: List[str]) -> None:
        """``model``: a serialised SentencePiece model; ``RuntimeError`` where it is none."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        super().__init__(vocabulary, cased=True, model=model)

    @classmethod
    def from_files(cls, directory: Path, settings: Dict[str, Any]) -> "MicrosoftAmosTokenizer":
        symbols = read_dictionary_symbols(directory / DICTIONARY_FILE)
        return cls._of(directory, [unspell_piece(symbol) for symbol in symbols])

    @classmethod
    def from_release(cls, directory: Path) -> "MicrosoftAmosTokenizer":
        """From the two files of the release, which have no settings beside them.

        Raises:
            UserError: one is missing or broken, or ``dict.txt`` lists a piece twice or a special symbol.
        """
        for name in (cls.model_file, DICTIONARY_FILE):
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory / name} is missing: give the directory with the sp.model and dict.txt of the release"
                )
        symbols = read_dictionary_symbols(directory / DICTIONARY_FILE)
        listed = set(SPECIAL_SYMBOLS)
        for number, symbol in enumerate(symbols, 1):
            if symbol in listed:
                raise UserError(
                    f"{directory / DICTIONARY_FILE}, line {number}: {symbol!r} is there twice, or is one of fairseq's own "
                    "symbols; give the dictionary of the release"
                )
            listed.add(symbol)
        return cls._of(directory, symbols)

    @classmethod
    def _of(cls, directory: Path, vocabulary: List[str]) -> "MicrosoftAmosTokenizer":
        path = directory / cls.model_file
        try:
            return cls(read_model_file(path), vocabulary)
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model: {error}") from error

    def encode_lines(self, lines: List[str]) -> List[List[str]]:
        treated = [text_of(treat(line)) for line in lines]
        encoded = self._processor.encode(treated, out_type=str, num_threads=1)
        return [[self._spellings[pieces[place]] for place in places_kept(pieces)] for pieces in encoded]

    def encode_with_offsets(self, line: str) -> List[Tuple[str, int, int]]:
        characters = treat(line)
        encoded = self._processor.encode(text_of(characters), return_type="offset_mapping")
        pieces = encoded["pieces"]
        # The end of the line follows the last character, for pieces that stand for none.
        starts = [character.start for character in characters] + [len(line)]
        ends = [0] + [character.end for character in characters]
        aligned = []
        for place in places_kept(pieces):
            start, end = encoded["offsets"][place]
            aligned.append((pieces[place], starts[start], max(starts[start], ends[end])))
        return [(self._spellings[piece], start, end) for piece, start, end in tidy_spans(line, aligned)]

    def decode(self, pieces: List[str]) -> str:
        return self._processor.decode_pieces([unspell_piece(piece) for piece in pieces])
