"""Write the tokenizer of an exported folder: :mod:`amos_fairseq.text.tokenization.exported`, with the ids of the folder."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.weights import CUSTOM
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization.conversion import token_ids
from amos_fairseq.text.tokenization.exported import exported_tokenizer, with_padding_at_1
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer, row_map
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, PAD, UNK, unspell_piece

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The role in Hugging Face's tokenizers | fairseq's symbol. Some clients use the cls/sep names, others bos/eos.
_ROLES = {
    "bos_token": BOS,
    "cls_token": BOS,
    "eos_token": EOS,
    "sep_token": EOS,
    "pad_token": PAD,
    "unk_token": UNK,
    "mask_token": MASK_SYMBOL,
}
# These compute positions from the padding id, which must be 1.
_PADDING_AT_1 = ("mpnet", "roberta", CUSTOM)
# The other classes refuse, or ignore, an input that they do not have.
_WITH_TOKEN_TYPES = ("bert", "electra")


class TokenIds(NamedTuple):
    """How the ids of a folder's tokenizer relate to the rows of our vocabulary.

    Attributes:
        ids: [dictionary size] int64, the id of each of our rows, -1 where there is no token for it.
        num_rows: number of vocabulary rows of the folder's model.
        special_ids: fairseq's symbol -> its id, or None if it has none.
    """

    ids: Tensor
    num_rows: int
    special_ids: dict[str, int | None]


def write_tokenizer(folder: Path, loaded: LoadedCheckpoint, family: str, max_length: int) -> TokenIds:
    """Write our tokenizer for a model of ``family``; longer inputs are truncated as in fine-tuning, where a client asks."""
    tokenizer, end = loaded.tokenizer, loaded.dictionary.eos()
    if loaded.separator not in (None, end):
        raise UserError(
            f"{loaded.file} was fine-tuned with --separator-token {loaded.separator}: exported tokenizers write only </s>, "
            f"token {end}, between two texts"
        )
    if isinstance(tokenizer, FastTokenizer):
        return _write_fast_tokenizer(folder, tokenizer, family, max_length, loaded.num_separators)
    return _write_tokenizer_with_code(folder, tokenizer, max_length, loaded.num_separators)


def _write_fast_tokenizer(
    folder: Path, tokenizer: FastTokenizer, family: str, max_length: int, num_separators: int
) -> TokenIds:
    from transformers import PreTrainedTokenizerFast

    special_tokens = tokenizer.special_tokens
    ids, library = row_map(tokenizer), exported_tokenizer(tokenizer, num_separators)
    if family in _PADDING_AT_1:
        library, ids = with_padding_at_1(library, special_tokens[PAD], ids)
    library.enable_truncation(max_length, strategy="longest_first")
    present = {token.content: token for token in library.get_added_tokens_decoder().values()}
    types = ["token_type_ids"] if family in _WITH_TOKEN_TYPES else []
    PreTrainedTokenizerFast(
        tokenizer_object=library,
        model_max_length=max_length,
        model_input_names=["input_ids", *types, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{role: present[special_tokens[symbol]] for role, symbol in _ROLES.items() if symbol in special_tokens},
    ).save_pretrained(folder)
    # transformers 5 writes its new names, with which transformers 4 cannot load the folder; both know the former names.
    former = {"additional_special_tokens": list(tokenizer.protected)} if tokenizer.protected else {}
    _add_to_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_class="PreTrainedTokenizerFast", **former)
    num_rows = max(library.get_vocab(with_added_tokens=True).values()) + 1
    return TokenIds(ids, num_rows, {symbol: library.token_to_id(token) for symbol, token in special_tokens.items()})


def _write_tokenizer_with_code(
    folder: Path, tokenizer: MicrosoftAmosTokenizer, max_length: int, num_separators: int
) -> TokenIds:
    from amos_fairseq.hugging_face.custom_code.tokenization_amos import AmosTokenizer

    ids, special_tokens = token_ids([unspell_piece(symbol) for symbol in tokenizer.dictionary_symbols])
    files = {name: folder / file for name, file in AmosTokenizer.vocab_files_names.items()}
    files["vocab_file"].write_bytes(tokenizer.model)
    files["ids_file"].write_text(json.dumps(ids, ensure_ascii=False, indent=0), encoding="utf-8")
    roles = {role: special_tokens[symbol] for role, symbol in _ROLES.items()}
    settings = {"model_max_length": max_length, "num_separators": num_separators, **roles}
    AmosTokenizer(**{name: str(path) for name, path in files.items()}, **settings).save_pretrained(folder)
    _add_to_json(folder / TOKENIZER_CONFIG_FILE, auto_map=custom_code.TOKENIZER_AUTO_MAP)
    return TokenIds(torch.arange(len(ids)), len(ids), {symbol: ids[token] for symbol, token in special_tokens.items()})


def _add_to_json(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | entries, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
