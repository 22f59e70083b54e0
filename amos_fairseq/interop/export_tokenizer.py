"""The tokenizer of an exported folder: ``tokenizer.json``, or code where no ``tokenizer.json`` gives the same ids."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Optional

import torch
from torch import Tensor

from amos_fairseq.interop.export_code import TOKENIZER_CODE, write_code
from amos_fairseq.interop.fast_tokenizer import FastTokenizer, fast_tokenizer, free_spellings, with_padding_at_1
from amos_fairseq.interop.hugging_face_config import CUSTOM
from amos_fairseq.interop.hugging_face_rows import embedding_symbols
from amos_fairseq.interop.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.interop.piece_spelling import BOS, EOS, PAD, UNK, unspell_piece
from amos_fairseq.interop.tokenizer_base import Tokenizer
from amos_fairseq.special_tokens import MASK_SYMBOL

# The role in Hugging Face's tokenizers | fairseq's symbol. Some clients read the one pair of names, some the other.
_ROLES = {
    "bos_token": BOS, "cls_token": BOS, "eos_token": EOS, "sep_token": EOS,
    "pad_token": PAD, "unk_token": UNK, "mask_token": MASK_SYMBOL,
}  # fmt: skip
# These have no token types, and compute positions from where the padding token is, which they expect at id 1.
_LIKE_MPNET = ("mpnet", "roberta", CUSTOM)


@dataclass(frozen=True)
class FolderTokenizer:
    """How the folder's ids relate to our rows, and the way to write it.

    Attributes:
        ids: [dictionary size] int64, the id of each of our rows, -1 where there is no token for it.
        num_rows: rows of vocabulary that the folder's model needs.
        special_ids: fairseq's symbol to its id, without those that have none.
        save: writes the files into a folder.
        brings_code: the files are code too.
    """

    ids: Tensor
    num_rows: int
    special_ids: Dict[str, int]
    save: Callable[[Path], None]
    brings_code: bool = False

    def id_of(self, symbol: str) -> Optional[int]:
        return self.special_ids.get(symbol)


def folder_tokenizer(tokenizer: Tokenizer, family: str, longest: int) -> FolderTokenizer:
    """What ``family`` needs of our tokenizer; ``longest``: tokens that the model reads.

    Raises:
        UserError: nothing gives the same ids.
    """
    if isinstance(tokenizer, MicrosoftAmosTokenizer):
        return _with_code(tokenizer, longest)
    fast = fast_tokenizer(tokenizer)
    if family in _LIKE_MPNET:
        fast = with_padding_at_1(fast)
    special_ids = {symbol: fast.tokenizer.token_to_id(token) for symbol, token in fast.special_tokens.items()}
    return FolderTokenizer(
        fast.ids, fast.num_rows, special_ids, lambda folder: _save_fast(folder, fast, family, longest)
    )


def _save_fast(folder: Path, fast: FastTokenizer, family: str, longest: int) -> None:
    from transformers import PreTrainedTokenizerFast

    present = {token.content: token for token in fast.tokenizer.get_added_tokens_decoder().values()}
    roles = {role: symbol for role, symbol in _ROLES.items() if symbol in fast.special_tokens}
    types = [] if family in _LIKE_MPNET else ["token_type_ids"]
    PreTrainedTokenizerFast(
        tokenizer_object=fast.tokenizer,
        model_max_length=longest,
        model_input_names=["input_ids", *types, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{role: present[fast.special_tokens[symbol]] for role, symbol in roles.items()},
    ).save_pretrained(folder)
    # transformers 5 writes its new name for the class, which transformers 4 cannot load; it still knows the old name.
    _add_to_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _with_code(tokenizer: MicrosoftAmosTokenizer, longest: int) -> FolderTokenizer:
    """The released tokenizer drops pieces that SentencePiece has found, for which a tokenizer.json has no step."""
    pieces = [unspell_piece(symbol) for symbol in tokenizer.dictionary_symbols]
    special_tokens = free_spellings(set(pieces))
    tokens = [special_tokens.get(symbol, symbol) for symbol in embedding_symbols([])]
    tokens[-1:-1] = pieces  # <mask> stays last
    ids = {token: index for index, token in enumerate(tokens)}

    def save(folder: Path) -> None:
        from amos_fairseq.interop.remote_code.tokenization_amos import AmosTokenizer

        files = {name: folder / file for name, file in AmosTokenizer.vocab_files_names.items()}
        files["vocab_file"].write_bytes(tokenizer.model)
        files["ids_file"].write_text(json.dumps(ids, ensure_ascii=False, indent=0), encoding="utf-8")
        roles = {role: special_tokens[symbol] for role, symbol in _ROLES.items()}
        places = {name: str(path) for name, path in files.items()}
        AmosTokenizer(**places, **roles, model_max_length=longest).save_pretrained(folder)
        write_code(folder, TOKENIZER_CODE)
        _add_to_json(
            folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_amos.AmosTokenizer", None]}
        )

    special_ids = {symbol: ids[token] for symbol, token in special_tokens.items()}
    return FolderTokenizer(torch.arange(len(tokens)), len(tokens), special_ids, save, brings_code=True)


def _add_to_json(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | entries, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
