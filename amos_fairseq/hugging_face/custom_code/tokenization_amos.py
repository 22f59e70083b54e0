"""The tokenizer of the released AMOS checkpoint as a Hugging Face tokenizer.

It drops pieces after SentencePiece has split the text, which a ``tokenizer.json`` cannot express. Loading it needs
``trust_remote_code=True`` and the sentencepiece package.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer

from amos_fairseq.text.tokenization.standalone import kept_lengths, normalize, text_of, without_lone_marks


class AmosTokenizer(PreTrainedTokenizer):
    """``<s> A </s>``, ``<s> A </s> B </s>``; ids are those of the folder's ``vocab.json``.

    ``num_separators``: number of ``</s>`` between A and B, 1 or 2.
    """

    vocab_files_names = {"vocab_file": "sp.model", "ids_file": "vocab.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, ids_file: str, num_separators: int = 1, **settings: Any) -> None:
        self.num_separators = num_separators
        self.vocab_file, self.ids_file = vocab_file, ids_file
        self._processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        self._ids = json.loads(Path(ids_file).read_text(encoding="utf-8"))
        self._pieces = {index: piece for piece, index in self._ids.items()}
        super().__init__(num_separators=num_separators, **settings)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        pieces = self._processor.encode(text_of(normalize(text)), out_type=str)
        return [pieces[index] for index in without_lone_marks(pieces)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._ids[self.unk_token])

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._processor.decode_pieces(tokens)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        more = [self.sep_token_id] * (self.num_separators - 1)
        second = [] if token_ids_1 is None else [*more, *token_ids_1, self.sep_token_id]
        return [self.cls_token_id, *token_ids_0, self.sep_token_id, *second]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, True)
        ids = self.build_inputs_with_special_tokens(token_ids_0, token_ids_1)
        return [int(index in (self.cls_token_id, self.sep_token_id)) for index in ids]

    def truncate_sequences(
        self,
        ids: list[int],
        pair_ids: list[int] | None = None,
        num_tokens_to_remove: int = 0,
        truncation_strategy: str = "longest_first",
        stride: int = 0,
    ) -> tuple[list[int], list[int] | None, list[int]]:
        """Cut the longer text of a pair first, with the rule of fast tokenizers and of fine-tuning."""
        if pair_ids is None or truncation_strategy != "longest_first":
            return super().truncate_sequences(ids, pair_ids, num_tokens_to_remove, truncation_strategy, stride)
        lengths = len(ids), len(pair_ids)
        first, second = kept_lengths(lengths, max(0, sum(lengths) - num_tokens_to_remove))
        return ids[:first], pair_ids[:second], []

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        copies = []
        for source, name in ((self.vocab_file, "sp.model"), (self.ids_file, "vocab.json")):
            copy = Path(save_directory) / (prefix + name)
            if Path(source).resolve() != copy.resolve():
                shutil.copyfile(source, copy)
            copies.append(str(copy))
        return tuple(copies)
