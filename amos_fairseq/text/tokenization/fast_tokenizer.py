"""A ``tokenizer.json`` of the `tokenizers` library: a vocabulary that ``amos prepare`` learned, or one of Hugging Face."""

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, processors

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.raw_words import UNSPACED
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization.tokenizer import (
    BOS,
    COPY_AGAIN,
    EOS,
    PAD,
    SPACE,
    SPECIAL_SYMBOLS,
    UNK,
    Tokenizer,
    embedding_symbols,
)
from amos_fairseq.text.tokenization.word_pieces import AlignedPiece, unspell_piece
from amos_fairseq.untrusted import LAST_KEYS, is_unicode, parse_json, read_bytes, read_json

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# Kinds: what learned the vocabulary. The last is a file of unknown origin.
SENTENCEPIECE, HUGGING_FACE = "sentencepiece", "huggingface"
# Limits of the cache of encoded words: its memory is bounded for any text.
_CACHE_SIZE = 1 << 18
_LONGEST_CACHED = 64
_PROTECTED = "protected_tokens"  # in the settings, where there are any
# In a row map: the tokenizer has no token for this row.
ABSENT = -1
ADD_UNKNOWN = "give one with a token for what its vocabulary lacks, such as [UNK], named as unk_token of its model"
# Every input needs these: <s> text </s>, padded.
_REQUIRED = (BOS, PAD, EOS)
# fairseq's symbol | names in Hugging Face's configuration files | usual spellings, both in order of preference
ROLES = (
    (BOS, ("cls_token", "bos_token"), ("[CLS]", "<s>")),
    (PAD, ("pad_token",), ("[PAD]", "<pad>")),
    (EOS, ("sep_token", "eos_token"), ("[SEP]", "</s>")),
    (UNK, ("unk_token",), ("[UNK]", "<unk>")),
    (MASK_SYMBOL, ("mask_token",), ("[MASK]", "<mask>")),
)
_CONFIGURATION_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's pieces for characters that have none
# Behind a piece that ends within a character: the rest of one of the same script.
_LAST_BYTES, _SPELLED_LAST_BYTES = b"\x80\x80\x80", "Ģ" * 3


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; the vocabulary is its own, in the order of its ids.

    Its special tokens stand for fairseq's symbols (``special_tokens``: fairseq's symbol to its token) and have no line in
    ``dict.txt``; other added tokens are pieces and remain whole. The ``protected`` ones of these are special for all
    objectives. Unknown words and characters become ``<unk>``. A learned tokenizer (``kind`` sentencepiece) splits text at
    spaces first, so the pieces of frequent words are cached.
    """

    model_file = "tokenizer.json"

    def __init__(
        self, model: bytes, special_tokens: dict[str, str], kind: str = HUGGING_FACE, protected: Sequence[str] = ()
    ) -> None:
        """``model``: the bytes of a ``tokenizer.json``; raises ``ValueError`` for anything else."""
        self.kind = kind
        self._tokenizer = _parse(_without_special_roles(model, special_tokens.values()))
        # The task decides about lengths, and a text that spells "[MASK]" is text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.can_decode = self._tokenizer.decoder is not None
        self.special_tokens, self.protected = special_tokens, protected
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        special_ids = {ids[token]: symbol for symbol, token in special_tokens.items()}
        vocabulary = sorted((piece for piece in ids if ids[piece] not in special_ids), key=ids.__getitem__)
        super().__init__(vocabulary, "A" in self.normalize("A"), model)
        is_learned = kind != HUGGING_FACE
        self._words = _Words(self._encode_words) if is_learned else None
        # The special tokens that the model may find in a text.
        self._token_of_id = {} if is_learned else {i: special_tokens[symbol] for i, symbol in special_ids.items()}
        self._symbol_of_id = {
            ids[piece]: symbol for piece, symbol in zip(vocabulary, self.dictionary_symbols, strict=True)
        }
        self.hugging_face_ids: dict[str, int] = {symbol: index for index, symbol in self._symbol_of_id.items()}
        self.hugging_face_ids |= {symbol: index for index, symbol in special_ids.items()}
        self._symbol_of_id |= {index: UNK for index, symbol in special_ids.items() if symbol == UNK}

    @classmethod
    def from_files(cls, directory: Path, settings: dict[str, Any]) -> "FastTokenizer":
        path = directory if directory.is_file() else directory / cls.model_file
        model = read_bytes(path, COPY_AGAIN)
        try:
            library = _parse(model)
            if dropout := getattr(library.model, "dropout", None):
                library.model.dropout = None
                model = library.to_str(pretty=True).encode("utf-8")
                logger.warning(
                    f"{path}: the dropout of its merges ({dropout:g}) is switched off, so that a text has one encoding"
                )
            special_tokens = settings.get("special_tokens") or find_special_tokens(directory, library)
            # Settings name all that is protected; without settings it is what the tokenizer.json calls special.
            protected = settings.get(_PROTECTED, []) if settings else find_markers(library, special_tokens)
            tokenizer = cls(model, special_tokens, settings.get("kind", HUGGING_FACE), protected)
            if not len(tokenizer):
                raise ValueError("its vocabulary is empty")
            return tokenizer
        except ValueError as error:
            raise UserError(f"{path} is not a usable tokenizer.json: {error}") from error

    def settings(self) -> dict[str, Any]:
        protected = {_PROTECTED: list(self.protected)} if self.protected else {}
        return {**super().settings(), "special_tokens": self.special_tokens, **protected}

    def with_protected(self, tokens: Sequence[str]) -> "FastTokenizer":
        library = _parse(self.model)
        new = [token for token in dict.fromkeys(tokens) if token not in self.protected]
        for token in new:
            if token in self.special_tokens.values() or library.token_to_id(token) is None:
                raise UserError(f"{token} is special already, or not in its vocabulary: leave it out, or add it there")
        library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in new])
        model = library.to_str(pretty=True).encode("utf-8")
        return FastTokenizer(model, self.special_tokens, self.kind, [*self.protected, *new])

    def hugging_face_tokenizer(self) -> tokenizers.Tokenizer:
        """Return a copy of the library's tokenizer, in which a text that spells a special token is that token."""
        return _parse(_without_special_roles(self.model, self.special_tokens.values()))

    def encode_lines(self, lines: list[str]) -> list[list[str]]:
        with _explaining_refused_text(lines):
            if self._words is not None:
                words = [line.split(" ") for line in lines]
                self._words.add(itertools.chain.from_iterable(words))
                return [list(itertools.chain.from_iterable(map(self._words.__getitem__, line))) for line in words]
            encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return [self._symbols(line, encoding) for line, encoding in zip(lines, encodings, strict=True)]

    def normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def align(self, line: str) -> Iterator[AlignedPiece]:
        return self._aligned_symbols(line, self._encoding(line))

    def finds_special_token(self, line: str) -> bool:
        encoding = self._encoding(line)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return any(self._is_spelled(index, line[start:end].strip()) for index, (start, end) in spans)

    def _encoding(self, line: str) -> tokenizers.Encoding:
        with _explaining_refused_text([line]):
            return self._tokenizer.encode(line, add_special_tokens=False)

    def decode(self, pieces: list[str]) -> str:
        # Not through ids: fairseq's symbols have no id if the tokenizer lacks the role.
        tokens = [self.special_tokens.get(piece, piece) if piece in SPECIAL_SYMBOLS else piece for piece in pieces]
        tokens = [unspell_piece(token) for token in tokens]
        return self._tokenizer.decoder.decode(tokens) if self._tokenizer.decoder else " ".join(tokens)

    def _encode_words(self, words: list[str]) -> list[tuple[str, ...]]:
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)  # without offsets
        return [tuple(map(self._symbol_of_id.__getitem__, encoding.ids)) for encoding in encodings]

    def _symbols(self, line: str, encoding: tokenizers.Encoding) -> list[str]:
        if self._token_of_id.keys().isdisjoint(encoding.ids):
            return [self._symbol_of_id[index] for index in encoding.ids]
        return [symbol for symbol, _, _ in self._aligned_symbols(line, encoding)]

    def _aligned_symbols(self, line: str, encoding: tokenizers.Encoding) -> Iterator[AlignedPiece]:
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            surface = line[start:end].strip()
            if self._is_spelled(index, surface):
                yield from self._symbols_of_characters(surface, line.index(surface, start))
            else:
                yield self._symbol_of_id[index], start, end

    def _is_spelled(self, index: int, surface: str) -> bool:
        """Return whether a text spells a special token, or a model without pre-tokenizer found one in its own vocabulary."""
        token = self._token_of_id.get(index)
        return token is not None and (index not in self._symbol_of_id or surface == token)

    def _symbols_of_characters(self, surface: str, start: int) -> Iterator[AlignedPiece]:
        """Encode each character by itself: a single character cannot spell a special token."""
        for position, character in enumerate(surface, start):
            for index in self._tokenizer.encode(character, add_special_tokens=False).ids:
                yield self._symbol_of_id.get(index, UNK), position, position + 1


@contextlib.contextmanager
def _explaining_refused_text(lines: list[str]) -> Iterator[None]:
    """Raise :class:`UserError` where the library has no piece for a character, or a text is not Unicode."""
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        advice = ADD_UNKNOWN if all(map(is_unicode, lines)) else "give text in Unicode"
        raise UserError(f"the tokenizer cannot encode the text ({error}): {advice}") from error


class _Words(dict[str, tuple[str, ...]]):
    """``words[word]`` is the pieces of a word. Short words that were added are cached; a full cache is emptied."""

    def __init__(self, encode: Callable[[list[str]], list[tuple[str, ...]]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> tuple[str, ...]:
        return self._encode([word])[0]

    def add(self, words: Iterable[str]) -> None:
        """Encode new words together, which takes two thirds of the time."""
        if len(self) > _CACHE_SIZE:
            self.clear()
        new = [word for word in set(words) if word not in self and len(word) <= _LONGEST_CACHED]
        self.update(zip(new, self._encode(new), strict=True))


def frame_inputs(tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str], num_separators: int = 1) -> None:
    """Make it encode ``<s> text </s>``, and a pair as ``<s> A </s> B </s>``, with ``num_separators`` between A and B."""
    begin, end = special_tokens[BOS], special_tokens[EOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{begin}:0", "$A:0", f"{end}:0"],
        pair=[f"{begin}:0", "$A:0", f"{end}:0", *[f"{end}:1"] * (num_separators - 1), "$B:1", f"{end}:1"],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)],
    )


def row_map(tokenizer: FastTokenizer) -> "Tensor":
    """Return the Hugging Face id of each row of our embedding: [dictionary size] int64, ``ABSENT`` where it has none."""
    import torch  # not needed to tokenize

    ids = tokenizer.hugging_face_ids
    absent = [symbol for symbol in _REQUIRED if symbol not in ids]
    if absent:
        raise UserError(
            f"the tokenizer has no token in the role of {', '.join(absent)}: name it in special_tokens_map.json "
            "(cls_token or bos_token, pad_token, sep_token or eos_token)"
        )
    return torch.tensor([ids.get(symbol, ABSENT) for symbol in embedding_symbols(tokenizer.dictionary_symbols)])


def find_special_tokens(directory: Path, tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
    """Return fairseq's symbol -> the tokenizer's token, from its configuration files, else from the usual spellings."""
    configured: dict[str, str | None] = {}
    for name in _CONFIGURATION_FILES:
        configured = {**_configured_tokens(directory / name), **configured}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # What the model makes of unknown characters, whatever the files call so.
    if unknown := _unknown_token(tokenizer):
        configured["unk_token"] = unknown
    # MPNet's vocabulary also has BERT's [CLS], ... as ordinary pieces.
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special_tokens: dict[str, str] = {}
    for symbol, names, spellings in ROLES:
        usual = sorted(spellings, key=lambda spelling: spelling not in added)
        candidates = (*(configured.get(name) for name in names), *usual)
        token = next((token for token in candidates if token in vocabulary), None)
        # Some tokenizers use one token in two roles; an id can stand for one symbol only.
        if token is not None and token not in special_tokens.values():
            special_tokens[symbol] = token
    return special_tokens


def _unknown_token(tokenizer: tokenizers.Tokenizer) -> str | None:
    model = json.loads(tokenizer.to_str())["model"]
    index = model.get("unk_id")  # of unigrams, in place of a name
    return model.get("unk_token") if index is None else model["vocab"][index][0]


def find_markers(library: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> list[str]:
    """Return what the tokenizer calls special beside the ``special_tokens`` that stand for fairseq's symbols."""
    added = library.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and token.content not in special_tokens.values()]


def _configured_tokens(path: Path) -> dict[str, str | None]:
    content = read_json(path, "take it from the model again, or remove it", optional=True, **LAST_KEYS) or {}
    configured: dict[str, str | None] = {}
    for name in (name for _, names, _ in ROLES for name in names if name in content):
        # A token is written as a string or as {"content": string, ...}.
        token = content[name].get("content") if isinstance(content[name], dict) else content[name]
        configured[name] = token if isinstance(token, str) else None
    return configured


def _without_special_roles(model: bytes, roles: Collection[str]) -> bytes:
    """Return a ``tokenizer.json`` in which only ``roles`` are special; other added tokens, such as markers, remain whole."""
    try:
        content = parse_json(model, **LAST_KEYS)
        others = [token for token in content["added_tokens"] if token["special"] and token["content"] not in roles]
    except (ValueError, KeyError, TypeError):
        return model  # the library explains what is wrong
    if not others:
        return model
    for token in others:
        token["special"] = False
    return json.dumps(content, ensure_ascii=False).encode("utf-8")


def _parse(model: bytes) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
        with contextlib.suppress(Exception):  # without an unknown token some texts are refused, but none panics
            library.encode("A")
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ValueError(str(error)) from error
    return library


def _is_of_library(error: BaseException) -> bool:
    """Return whether it can be one of the library, which raises nothing narrower; a panic of its Rust code is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return True for each row of the embedding that begins a word: [dictionary size] bool.

    A piece begins a word if it has the mark of one (SentencePiece's U+2581, a space of byte-level BPE), if it lacks the mark of
    a continued word (## of WordPiece), or if its first character belongs to a script without spaces. Where no piece continues a
    word (whole words, single characters), each one begins a word.
    """
    pieces = [unspell_piece(symbol) for symbol in embedding_symbols(tokenizer.dictionary_symbols)]
    content = json.loads(tokenizer.model) if isinstance(tokenizer, FastTokenizer) else {}
    model = content.get("model", {})
    steps = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if continuation := model.get("continuing_subword_prefix"):
        texts = [piece.removeprefix(continuation) for piece in pieces]
        has_mark = [not piece.startswith(continuation) for piece in pieces]
    elif '"ByteLevel"' in steps:
        decoder = decoders.ByteLevel()
        texts = [decoder.decode([piece + _SPELLED_LAST_BYTES]) for piece in pieces]
        has_mark = [text[0].isspace() for text in texts]
    elif model.get("type") != "WordLevel" and any(piece.startswith((SPACE, " ")) for piece in pieces):
        texts = list(map(_text_of_bytes, pieces))
        has_mark = [piece.startswith((SPACE, " ")) for piece in pieces]  # a space: written by amos export
    else:
        added = {token["content"] for token in content["added_tokens"]}
        ordinary = set(map(unspell_piece, tokenizer.dictionary_symbols)) - added
        if model["type"] != "WordLevel" and any(len(piece) > 1 for piece in ordinary):
            raise UserError("--whole-words: the tokenizer marks neither a new nor a continued word: leave it out")
        return np.ones(len(pieces), dtype=bool)
    return np.array(has_mark) | np.array([UNSPACED.match(text) is not None for text in texts])


def _text_of_bytes(piece: str) -> str:
    byte = _BYTE.fullmatch(piece)
    return piece if byte is None else (bytes.fromhex(byte[1]) + _LAST_BYTES).decode("utf-8", "replace")
