"""SentencePiece BPE: the base++ setting of AMOS (section 4), cased, 64,000 pieces."""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import sentencepiece

from amos_fairseq.errors import UserError
from amos_fairseq.interop.offsets import tidy_spans
from amos_fairseq.interop.piece_spelling import unspell_piece
from amos_fairseq.interop.tokenizer_base import Tokenizer, read_model_file

# SentencePiece's own rules: NFKC (a ligature or a full-width letter becomes plain ones), control characters removed,
# every kind of space one space; "_cf" also folds case. They lie inside the model file, so encoding cannot differ.
NORMALIZATION = {True: "nmt_nfkc", False: "nmt_nfkc_cf"}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model without control symbols; its ``<unk>`` is fairseq's.

    Treated text is NFKC (case-folded where ``cased`` is false) with runs of spaces made one. A character without a
    piece keeps its surface in ``encode`` and so survives ``decode``; only the literal U+2581, SentencePiece's mark for
    a space, comes back as a space.
    """

    kind = "sentencepiece"
    model_file = "sentencepiece.model"

    def __init__(self, model: bytes, cased: bool) -> None:
        """``model``: a serialised SentencePiece model; ``RuntimeError`` where it is none."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ordinary = (i for i in range(len(self._processor)) if not _is_symbol(self._processor, i))
        super().__init__([self._processor.id_to_piece(i) for i in ordinary], cased, model)

    @classmethod
    def from_files(cls, directory: Path, settings: Dict[str, Any]) -> "SentencePieceTokenizer":
        path = directory / cls.model_file
        try:
            return cls(read_model_file(path), settings["cased"])
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model: {error}") from error

    def encode_lines(self, lines: List[str]) -> List[List[str]]:
        spellings = self._spellings
        encoded = self._processor.encode(lines, out_type=str, num_threads=1)
        return [[spellings[piece] for piece in pieces] for pieces in encoded]

    def encode_with_offsets(self, line: str) -> List[Tuple[str, int, int]]:
        encoded = self._processor.encode(line, return_type="offset_mapping")
        spans = zip(encoded["pieces"], encoded["offsets"], strict=True)
        tidy = tidy_spans(line, ((piece, start, end) for piece, (start, end) in spans))
        return [(self._spellings[piece], start, end) for piece, start, end in tidy]

    def decode(self, pieces: List[str]) -> str:
        return self._processor.decode_pieces([unspell_piece(piece) for piece in pieces])


def _is_symbol(processor: sentencepiece.SentencePieceProcessor, index: int) -> bool:
    return processor.is_unknown(index) or processor.is_control(index) or processor.is_unused(index)
