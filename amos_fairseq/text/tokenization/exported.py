"""What ``amos export`` writes of a ``tokenizer.json``: the same pieces, with the special tokens of our inputs.

One difference is intended. In this package a text that spells ``<mask>`` or ``</s>`` is text; Hugging Face's clients need
``<mask>`` in a text to be the special token. Their option ``split_special_tokens=True`` makes it text, but for a model that has
its special tokens among its pieces (unigram, words): :func:`spelled_token_found`. Protected tokens are tokens on both sides
without that option.
"""

import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, processors

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.fast_tokenizer import SENTENCEPIECE, FastTokenizer, frame_inputs, row_map
from amos_fairseq.text.tokenization.tokenizer import PAD, SPACE, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_SEED = 1
_NUM_RANDOM_TEXTS = 300  # random characters, and as many of random pieces
# Unusual texts: accents as two characters, ligatures, scripts, emoji, control characters, spelled special tokens, no text.
_UNUSUAL_TEXTS = [
    "",
    " ",
    "a",
    "The quick brown fox doesn't jump over 1,234.5 lazy dogs (yet).",
    "  two  spaces\tand a tab ",
    "Café, cafe\u0301; E\u0301cole; naïve façade — “quoted” … ½ ﬁne \uff21\uff22 İstanbul ŒUVRE straße Ǆ ẛ̣",
    "中国 and 日本 カ\u3099 한국어 \u1112\u1161\u11ab हिन्दी العربية עברית ไทย",
    "🎉 snow☃man \U0001f9d1\u200d\U0001f33e 🇩🇪 \U0001d553",
    "line\nbreak\r\nand \u2028 \x85 \xa0 \u3000 \x07 control \x00 \ufeff \u200b soft\xadhyphen \ufdd0",
    "<s> </s> <mask> <pad> <unk> x<mask>y [MASK] [CLS] ##  </w> ▁ \\x{3c}",
    "e\u0301\u0302 combining \u0301 alone a\u0344",
    "x" * 2000,
    "Donaudampfschifffahrtsgesellschaftskapitän " * 20,
]


def export_obstacle(tokenizer: Tokenizer) -> str | None:
    """Return why no model with the tokenizer could be exported; None if one could."""
    if isinstance(tokenizer, FastTokenizer):
        try:
            ids = row_map(tokenizer)
            with_padding_at_1(exported_tokenizer(tokenizer), tokenizer.special_tokens[PAD], ids)
        except UserError as error:
            return str(error)
    return None


def spelled_token_found(tokenizer: Tokenizer) -> str | None:
    """Return a special token that the exported tokenizer finds in every text that spells it; None if there is none."""
    special_tokens = tokenizer.special_tokens.values() if isinstance(tokenizer, FastTokenizer) else ()
    return next((token for token in special_tokens if tokenizer.finds_special_token(f"a {token} b")), None)


def exported_tokenizer(tokenizer: FastTokenizer, num_separators: int = 1) -> tokenizers.Tokenizer:
    """Return the library's tokenizer with the inputs of our models; tokens that stand for our symbols become special."""
    library = tokenizer.hugging_face_tokenizer()
    library.no_truncation()
    library.no_padding()
    present = {token.content: token for token in library.get_added_tokens_decoder().values()}
    for content in (*tokenizer.special_tokens.values(), *tokenizer.protected):
        token = present.get(content) or AddedToken(content, normalized=False)
        token.special = True
        library.add_special_tokens([token])
    if tokenizer.kind == SENTENCEPIECE:
        library = with_spaces_in_pieces(library)
    # The second: of a folder that this function has written.
    trims_offsets = any("ByteLevel" in str(step) for step in (library.pre_tokenizer, library.post_processor))
    frame_inputs(library, tokenizer.special_tokens, num_separators)
    if tokenizer.kind == SENTENCEPIECE or trims_offsets:
        # add_prefix_space: a space that the first piece begins with may not be in the text, and is not trimmed.
        trimmed = processors.ByteLevel(trim_offsets=True, add_prefix_space=True)
        library.post_processor = processors.Sequence([trimmed, library.post_processor])
    return library


def with_spaces_in_pieces(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Spell SentencePiece's "\u2581" as a space: the library's step that removes spaces from offsets looks for these."""
    content = json.loads(library.to_str())
    model = content["model"]
    model["vocab"] = {piece.replace(SPACE, " "): index for piece, index in model["vocab"].items()}
    model["merges"] = [[part.replace(SPACE, " ") for part in pair] for pair in model["merges"]]
    for step in (content["pre_tokenizer"], content["decoder"]):
        step["replacement"] = " "
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def with_padding_at_1(
    library: tokenizers.Tokenizer, padding: str, ids: "Tensor"
) -> tuple[tokenizers.Tokenizer, "Tensor"]:
    """Exchange the ids of ``padding`` and of the token at 1, also in ``ids``: MPNet and RoBERTa need the padding id 1."""
    pad = library.token_to_id(padding)
    if pad == 1:
        return library, ids
    if padding not in library.get_vocab(with_added_tokens=False):
        raise UserError(
            f"the padding token {padding} was added to the vocabulary later: its id {pad} cannot become 1, as MPNet and "
            "RoBERTa need: put it into the vocabulary of the model, or train without relative positions "
            "(--relative-position-scheme none)"
        )
    exchanged = {pad: 1, 1: pad}
    content = json.loads(library.to_str())
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: exchanged.get(index, index) for token, index in vocabulary.items()}
    else:  # unigram: the position is the id
        vocabulary[1], vocabulary[pad] = vocabulary[pad], vocabulary[1]
        content["model"]["unk_id"] = exchanged.get(content["model"]["unk_id"], content["model"]["unk_id"])
    for token in content["added_tokens"]:
        token["id"] = exchanged.get(token["id"], token["id"])
    content["added_tokens"].sort(key=lambda token: token["id"])
    template = content["post_processor"].get("processors", [content["post_processor"]])[-1]
    for token in template["special_tokens"].values():
        token["ids"] = [exchanged.get(index, index) for index in token["ids"]]
    moved = tokenizers.Tokenizer.from_str(json.dumps(content))
    return moved, ids.clone().apply_(lambda index: exchanged.get(index, index))


def texts_to_compare(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield unusual texts, random characters and random pieces, without those of :func:`spelled_token_found`."""
    yield from (text for text in _all_texts(tokenizer) if not tokenizer.finds_special_token(text))


def _all_texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from _UNUSUAL_TEXTS
    yield from (f"a {token}b {token} c" for token in tokenizer.protected[:10])
    rng = random.Random(_SEED)
    planes = [*range(0xD800), *range(0xE000, 0x110000)]
    letters_and_accents = [*range(0x41, 0x7B), *range(0x300, 0x345)]
    alphabets = (planes, range(0x20, 0x7F), range(0x20, 0x250), letters_and_accents, range(0x3000))
    pieces = tokenizer.dictionary_symbols
    for _ in range(_NUM_RANDOM_TEXTS):
        yield "".join(chr(code) for code in rng.choices(rng.choice(alphabets), k=rng.randint(1, 40)))
        yield tokenizer.decode(rng.choices(pieces, k=rng.randint(1, 40)))
