"""SentencePiece BPE: the base++ setting of AMOS (section 4), cased, 64,000 pieces."""

from pathlib import Path
from typing import Any

import sentencepiece

from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.tokenizer import AlignedPiece, Tokenizer, read_model_file, tidy_spans, unspell_piece

# SentencePiece's own rules: NFKC (ligatures and full-width letters become plain letters), control characters removed,
# every kind of space one space; "_cf" also folds case. They are part of the model file, so encoding cannot differ.
NORMALIZATION = {True: "nmt_nfkc", False: "nmt_nfkc_cf"}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model without control symbols; its ``<unk>`` is fairseq's.

    Normalized text is NFKC (case-folded if ``cased`` is false) with single spaces. A character without a piece keeps its
    surface form in ``encode`` and so survives ``decode``; only a literal U+2581, SentencePiece's mark for a space, is decoded
    as a space.
    """

    kind = "sentencepiece"
    model_file = "sentencepiece.model"

    def __init__(self, model: bytes, cased: bool) -> None:
        """``model``: a serialized SentencePiece model; raises ``RuntimeError`` for anything else."""
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ordinary = (i for i in range(len(self._processor)) if not _is_symbol(self._processor, i))
        super().__init__([self._processor.id_to_piece(i) for i in ordinary], cased, model)

    @classmethod
    def from_files(cls, directory: Path, settings: dict[str, Any]) -> "SentencePieceTokenizer":
        path = directory / cls.model_file
        try:
            return cls(read_model_file(path), settings["cased"])
        except RuntimeError as error:
            raise UserError(f"{path} is not a SentencePiece model: {error}") from error

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        spellings = self._spellings
        encoded = self._processor.encode(lines, out_type=str, num_threads=1)
        return [[spellings[piece] for piece in pieces] for pieces in encoded]

    def encode_with_offsets(self, line: str) -> list[AlignedPiece]:
        encoded = self._processor.encode(line, return_type="offset_mapping")
        spans = zip(encoded["pieces"], encoded["offsets"], strict=True)
        tidy = tidy_spans(line, ((piece, start, end) for piece, (start, end) in spans))
        return [(self._spellings[piece], start, end) for piece, start, end in tidy]

    def decode(self, pieces: list[str]) -> str:
        return self._processor.decode_pieces([unspell_piece(piece) for piece in pieces])


def _is_symbol(processor: sentencepiece.SentencePieceProcessor, index: int) -> bool:
    return processor.is_unknown(index) or processor.is_control(index) or processor.is_unused(index)
