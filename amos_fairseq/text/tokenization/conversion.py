"""Read existing tokenizers: SentencePiece's model, fastBPE's codes, and the files of Hugging Face's `tokenizers`.

Each becomes a ``tokenizer.json`` once; all later steps read that. Every tokenizer is checked on text before it is used.
"""

import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.files import SETTINGS_FILE
from amos_fairseq.text import LARGEST_VOCABULARY, MASK_SYMBOL
from amos_fairseq.text.tokenization.fast_tokenizer import (
    HUGGING_FACE,
    ROLES,
    SENTENCEPIECE,
    FastTokenizer,
    find_special_tokens,
    frame_inputs,
)
from amos_fairseq.text.tokenization.tokenizer import SPACE, SPECIAL_SYMBOLS, UNK, Tokenizer, spell_piece, token_ids
from amos_fairseq.text.tokenization.word_pieces import AlignedPiece, unspell_piece
from amos_fairseq.untrusted import read_bytes, read_json, read_text

FASTBPE, END_OF_WORD, CONTINUED = "fastbpe", "</w>", "@@"
LONGEST_PIECE = 256
# A larger share of lost text is refused, above this number; pieces of which it is tried whether they remain whole.
LARGEST_LOSS, LEAST_LOST, _TRIED = 0.03, 5, 1000
# SentencePiece adds the scores of unigrams in float32, which decides between ways to split whose sums are this close.
_TIE = 1e-6
_HINT = "docs/text.md has the forms of tokenizers that are read"
# Values of sentencepiece_model.proto: of model_type, and of the type of a piece.
_UNIGRAM, _BPE = 1, 2
NORMAL, _USER_DEFINED, UNUSED, _BYTE = 1, 4, 5, 6
_ROLE_NAMES = {*SPECIAL_SYMBOLS, *itertools.chain.from_iterable(spellings for _, _, spellings in ROLES)}


def convert(path: Path, vocabulary: Path | None, lines: list[str]) -> Tokenizer | None:
    """Read a tokenizer of a form in docs/text.md, with the ``vocabulary`` of fastBPE's codes; None: a folder to load.

    ``lines``: text, of which the converted tokenizer of a SentencePiece model must give SentencePiece's own pieces.
    """
    if vocabulary is not None:
        return from_fastbpe_files(path, vocabulary)
    if path.is_dir():
        has_own = (path / FastTokenizer.model_file).exists() or (path / SETTINGS_FILE).exists()
        has_files = (path / "vocab.txt").exists() or (path / "merges.txt").exists()
        return from_hugging_face_files(path) if has_files and not has_own else None
    if path.name in ("vocab.txt", "vocab.json", "merges.txt"):
        return from_hugging_face_files(path.parent)
    if path.suffix == ".json":
        return FastTokenizer.from_files(path, {})
    content = read_bytes(path, _HINT)
    if codes := re.match(rb"(#version)|\S+ \S+ [0-9]+\r?\n", content):
        what = "subword-nmt, which are not read" if codes[1] else "fastBPE: give its vocabulary, too, by --vocabulary"
        raise UserError(f"{path} has the codes of {what}")
    return from_sentencepiece(path, content, lines)


def check_on_text(tokenizer: Tokenizer, lines: list[str]) -> None:
    """Refuse a tokenizer that loses some of these lines, or whose pieces are of another kind of model."""
    encoded = tokenizer.encode_lines(lines)
    pairs = list(zip(lines, encoded, strict=True))
    empty = [line for line, pieces in pairs if not pieces]
    unknown = [line for line, pieces in pairs for piece in pieces if piece == UNK]
    decoded = [(line, tokenizer.decode(pieces)) for line, pieces in pairs if UNK not in pieces and tokenizer.can_decode]
    differing = [line for line, text in decoded if _characters(tokenizer.normalize(line)) - _characters(text)]
    symbols = tokenizer.dictionary_symbols
    # Whole words, which BPE pieces read as unigrams are not: with a mark before them, or without one where a mark shows that a
    # piece goes on (WordPiece, fastBPE).
    words = [symbol for symbol in symbols if re.match(r"[\u2581\u0120]\w{2,}$", symbol)]
    words = (words or [symbol for symbol in symbols if re.match(r"\w{2,}$", symbol)])[:_TRIED]
    # Twice, because a model may have no space before a text.
    divided = [symbol for symbol in words if tokenizer.encode(tokenizer.decode([symbol] * 2))[-1:] != [symbol]]
    other, files = "give one that was made for this language", "give the file that the program wrote which learned it"
    for what, lost, number, advice in (
        ("pieces are divided again by it", divided if 10 * len(divided) > len(words) else [], len(words), files),
        ("unknown pieces", unknown, sum(map(len, encoded)), other),
        ("lines have no piece", empty, len(lines), other),
        ("lines have pieces that spell another text", differing, len(lines), files),
    ):
        if len(lost) > LEAST_LOST and len(lost) > LARGEST_LOSS * number:
            raise UserError(
                f"the tokenizer does not fit: {len(lost):,} of {number:,} {what}, the first: {lost[0]!r:.100}: {advice}"
            )


def _characters(text: str) -> Counter[str]:
    return Counter("".join(text.split()).replace(SPACE, ""))


def from_sentencepiece(path: Path, model: bytes, lines: list[str], num_rows: int = 0) -> FastTokenizer:
    """Convert a BPE or unigram model; its pieces keep their order, without the unknown, control and unused ones.

    With ``num_rows`` (of the table of a model that has this tokenizer) all pieces keep their ids: :func:`ids_in_place`.

    The library's step for a model's table of characters drops an accent behind a pair for which the table has a rule, and
    misses long pairs (halfwidth kana). Where the table composes accents, this is done beside it; but some texts (vocalized
    Arabic) need the table alone. What gives SentencePiece's pieces of ``lines`` is taken.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (DecodeError, RuntimeError) as error:
        raise UserError(
            f"{path} is not a SentencePiece model, nor a form that is known by its name: {_HINT}"
        ) from error
    kind = proto.trainer_spec.model_type
    kept = [
        piece
        for piece in proto.pieces
        if piece.type in (NORMAL, _BYTE) or (piece.type == _USER_DEFINED and piece.piece not in _ROLE_NAMES)
    ]
    longest = max((len(piece.piece) for piece in kept), default=0)
    if kind not in (_BPE, _UNIGRAM) or not 0 < len(kept) <= LARGEST_VOCABULARY or longest > LONGEST_PIECE:
        raise UserError(
            f"{path}: models of the types bpe and unigram are read, with 1 to {LARGEST_VOCABULARY:,} pieces of at most "
            f"{LONGEST_PIECE} characters; this one has type {kind}, {len(kept):,} pieces of {longest:,} characters"
        )
    symbols = {piece.piece: spell_piece(piece.piece) for piece in kept}
    symbol_of_id = [symbols.get(piece.piece, UNK) for piece in proto.pieces]
    lines = [line for line in lines if not any(name in line for name in _ROLE_NAMES)]
    expected = [[symbol_of_id[index] for index in line] for line in processor.encode(lines)]
    scores = {symbols[piece.piece]: piece.score for piece in kept}

    def are_equal(pieces: list[str], wanted: list[str]) -> bool:
        ours, theirs = (sum(scores.get(piece, 0.0) for piece in line) for line in (pieces, wanted))
        return pieces == wanted or (kind == _UNIGRAM and math.isclose(ours, theirs, rel_tol=_TIE))

    for composing in ([True] if processor.normalize("e\u0301") == processor.normalize("\xe9") else []) + [False]:
        tokenizer = library_of_pieces(proto, kept, sentencepiece_normalizer(proto.normalizer_spec, composing), num_rows)
        encoded = tokenizer.encode_lines(lines)
        pairs = [pair for pair in zip(encoded, expected, strict=True) if not are_equal(*pair)]
        if not pairs:
            return tokenizer
    pieces, wanted = pairs[0]
    place = next(index for index, pair in enumerate(itertools.zip_longest(*pairs[0])) if len({*pair}) > 1)
    context = "".join(map(unspell_piece, wanted[max(0, place - 12) : place])).replace(SPACE, " ")
    raise UserError(
        f"{path} cannot be converted exactly: behind {context!r} SentencePiece makes {wanted[place : place + 6]}, and the "
        f"tokenizers library {pieces[place : place + 6]}: give another tokenizer, or none, so that one is learned"
    )


def sentencepiece_normalizer(spec: Any, composing: bool) -> normalizers.Normalizer:
    """Return the library's steps for a model's ``normalizer_spec``, between two of NFC if ``composing``."""
    table = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    steps: list[Any] = [normalizers.NFC(), *table, normalizers.NFC()] if composing else table
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(rf"[ {SPACE}]+\z"), "")]
        steps += [] if spec.add_dummy_prefix else [normalizers.Replace(Regex(r"\A +"), "")]
    elif spec.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(r"\A(?=[\s\S])"), " "))
    return normalizers.Sequence(steps)


def ids_in_place(pieces: Sequence[str], num_rows: int) -> tuple[dict[str, int], dict[str, str]]:
    """Return token -> id and fairseq's symbol -> token, as DeBERTaV3 has them: [MASK] is behind the last piece.

    Rows of the table without a token get names that no text spells, so that they stay what they are.
    """
    ids = {token: index for index, token in enumerate(dict.fromkeys([*pieces, "[MASK]"]))}
    ids |= {f"[unused{row}]": row for row in range(len(ids), num_rows)}
    special_tokens = {symbol: next((each for each in names if each in ids), "") for symbol, _, names in ROLES}
    if absent := [symbol for symbol, token in special_tokens.items() if not token]:
        raise UserError(f"the SentencePiece model has no piece in the role of {', '.join(absent)}: give tokenizer.json")
    return ids, special_tokens


def library_of_pieces(
    proto: Any, pieces: Sequence[Any], normalizer: normalizers.Normalizer, num_rows: int = 0
) -> FastTokenizer:
    """Build the tokenizer of these ``pieces`` of a SentencePiece model."""
    spec, has_bytes = proto.normalizer_spec, proto.trainer_spec.byte_fallback
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    user_defined = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    if num_rows:
        ids, special_tokens = ids_in_place([piece.piece for piece in proto.pieces], num_rows)
    else:
        ids, special_tokens = token_ids([piece.piece for piece in pieces])
    # Where no piece goes on behind a space, words are split first, which is faster.
    has_words = SPACE in scores and not any(SPACE in piece[1:] for piece in [*scores, *user_defined])
    scheme = "first" if spec.add_dummy_prefix and spec.remove_extra_whitespaces else "never"
    split: Any = pre_tokenizers.Metaspace(SPACE, scheme, split=has_words)
    is_bpe = proto.trainer_spec.model_type == _BPE
    if is_bpe:
        # SentencePiece makes one piece of a run of unknown characters, hence fuse_unk.
        unknown = {"unk_token": special_tokens[UNK], "fuse_unk": True, "byte_fallback": has_bytes}
        model: Any = models.BPE(ids, sentencepiece_merges(scores), ignore_merges=bool(user_defined), **unknown)
        if user_defined:
            parts = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
            split = pre_tokenizers.Sequence([split, pre_tokenizers.Split(Regex(parts), "isolated")])
    else:
        # SentencePiece finds special tokens and bytes in no text: worse than the characters that spell them. Symbols of the
        # user get 0.1 for each byte behind the first.
        numbers = scores | {piece: 0.1 * len(piece.encode("utf-8")) - 0.1 for piece in user_defined}
        least = min(scores.values())
        scored = [(piece, numbers.get(piece, 8 * least - 1)) for piece in ids]
        model = models.Unigram(scored, ids[special_tokens[UNK]], has_bytes)
    library = tokenizers.Tokenizer(model)
    library.normalizer, library.pre_tokenizer = normalizer, split
    decoder = decoders.Metaspace(SPACE, "first" if spec.add_dummy_prefix else "never")
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoder]) if has_bytes else decoder
    is_plain = is_bpe and has_words and scheme == "first" and not has_bytes and not user_defined
    return finished(library, special_tokens, SENTENCEPIECE if is_plain else HUGGING_FACE)


def from_fastbpe_files(codes: Path, vocabulary: Path) -> FastTokenizer:
    """Convert fastBPE's ``codes`` (lines "first second count") with the pieces of ``vocabulary`` (lines "piece count")."""
    merges = [(first, second) for first, second, _ in _lines_of(codes, "first second count, as learnbpe writes codes")]
    pieces = dict.fromkeys(piece for piece, _ in _lines_of(vocabulary, "piece count, as getvocab writes it"))
    tokens = [piece.removesuffix(CONTINUED) if piece.endswith(CONTINUED) else piece + END_OF_WORD for piece in pieces]
    ids, special_tokens = token_ids(tokens)
    for token in itertools.chain(map("".join, merges), *merges):  # behind <mask>: what is divided again
        ids.setdefault(token, len(ids))
    model = models.BPE(ids, merges, unk_token=special_tokens[UNK], end_of_word_suffix=END_OF_WORD)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    library.decoder = decoders.BPEDecoder(END_OF_WORD)
    return FastBPETokenizer(finished(library, special_tokens).model, special_tokens, FASTBPE)


def _lines_of(path: Path, form: str) -> Iterator[list[str]]:
    text = read_text(path, f"--vocabulary is for fastBPE alone; {_HINT}")
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        parts = line.rstrip("\r").split(" ")
        is_long = max(map(len, parts)) > LONGEST_PIECE
        if len(parts) != form.count(" ", 0, form.find(",")) + 1 or not parts[-1].isdecimal() or is_long or "" in parts:
            raise UserError(f"{path}, line {number} is {line!a:.80}, not {form}: {_HINT}")
        yield parts


class FastBPETokenizer(FastTokenizer):
    """fastBPE: ``the@@`` goes on, ``the`` ends a word; words are what is between spaces, and text is not normalized.

    The library's pieces are ``the`` and ``the</w>``. Those that its merges need and the vocabulary lacks have ids behind
    ``<mask>`` and are divided again, as fastBPE does. Only this class does: the exported tokenizer leaves them whole.
    """

    def __init__(self, model: bytes, special_tokens: dict[str, str], kind: str, protected: Sequence[str] = ()) -> None:
        super().__init__(model, special_tokens, kind, protected)
        ids = self._tokenizer.get_vocab()
        halves = {"".join(pair): pair for pair in json.loads(model)["model"]["merges"]}
        tokens = sorted(ids.keys() - set(special_tokens.values()), key=ids.__getitem__)
        listed = {
            token: spell_piece(_fastbpe_piece(token))
            for token in tokens
            if ids[token] < ids[special_tokens[MASK_SYMBOL]]
        }
        self.dictionary_symbols = list(listed.values())

        def parts(token: str) -> tuple[tuple[str, int], ...]:
            if token in listed or token not in halves:
                return ((listed.get(token, UNK), len(token.removesuffix(END_OF_WORD))),)
            return tuple(itertools.chain.from_iterable(map(parts, halves[token])))

        # id -> its pieces, each with its number of characters
        self._parts = {ids[token]: parts(token) for token in tokens} | {ids[special_tokens[UNK]]: ((UNK, 1),)}
        self.hugging_face_ids = {listed[token]: ids[token] for token in listed}
        self.hugging_face_ids |= {symbol: ids[token] for symbol, token in special_tokens.items()}

    with_protected = Tokenizer.with_protected

    def decode(self, pieces: list[str]) -> str:
        return "".join(unspell_piece(piece) + " " for piece in pieces).replace(f"{CONTINUED} ", "").rstrip(" ")

    def finds_special_token(self, line: str) -> bool:
        """Return whether the exported tokenizer has another piece somewhere."""
        return any(len(self._parts[index]) > 1 for index in self._encoding(line).ids)

    def _encode_words(self, words: list[str]) -> list[tuple[str, ...]]:
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [tuple(symbol for index in encoding.ids for symbol, _ in self._parts[index]) for encoding in encodings]

    def _aligned_symbols(self, line: str, encoding: tokenizers.Encoding) -> Iterator[AlignedPiece]:
        for index, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            for symbol, length in self._parts[index]:
                yield symbol, start, start + length
                start += length


def _fastbpe_piece(token: str) -> str:
    return token.removesuffix(END_OF_WORD) if token.endswith(END_OF_WORD) else token + CONTINUED


def from_hugging_face_files(folder: Path) -> FastTokenizer:
    """Build the tokenizer of ``vocab.txt`` (WordPiece), or of ``vocab.json`` and ``merges.txt`` (BPE of bytes)."""

    def lines_of(name: str) -> list[str]:
        return read_text(folder / name, _HINT).removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n").split("\n")

    try:
        if (folder / "vocab.txt").exists():
            ids = {piece: index for index, piece in enumerate(lines_of("vocab.txt"))}
            words = [piece for piece in ids.keys() - _ROLE_NAMES if not piece.startswith("[")]
            config = read_json(folder / "tokenizer_config.json", _HINT, optional=True) or {}
            is_lower = config.get("do_lower_case", all(piece == piece.lower() for piece in words))
            marks = map(unicodedata.category, unicodedata.normalize("NFD", "".join(words)))
            if (strips := config.get("strip_accents")) is None:
                strips = is_lower and "Mn" not in marks
            library = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
            library.normalizer = normalizers.BertNormalizer(lowercase=is_lower, strip_accents=strips)
            library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            library.decoder = decoders.WordPiece(cleanup=False)
        else:
            lines = lines_of("merges.txt")
            merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :]]
            ids = read_json(folder / "vocab.json", _HINT)
            if not any("\u0120" in piece for piece in ids):  # a space, as a byte
                raise ValueError("its BPE is not one of bytes: give its tokenizer.json")
            library = tokenizers.Tokenizer(models.BPE(ids, merges))
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            library.decoder = decoders.ByteLevel()
        special_tokens = find_special_tokens(folder, library)
        return finished(library, {symbol: symbol for symbol in SPECIAL_SYMBOLS} | special_tokens)
    except UserError:
        raise
    except Exception as error:  # what the library raises
        raise UserError(f"the vocabulary files in {folder} cannot be read ({error!s:.200}): {_HINT}") from error


def finished(
    library: tokenizers.Tokenizer, special_tokens: Mapping[str, str], kind: str = HUGGING_FACE
) -> FastTokenizer:
    for symbol, token in special_tokens.items():
        # A space belongs to the word after it, so <mask>, which replaces a word, includes the space.
        library.add_special_tokens([AddedToken(token, lstrip=symbol == MASK_SYMBOL, normalized=False, special=True)])
    frame_inputs(library, special_tokens)
    return FastTokenizer(library.to_str(pretty=True).encode("utf-8"), dict(special_tokens), kind)


def sentencepiece_merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every way to join two pieces to a third in SentencePiece's order: best result, then longer first part, first."""
    ways = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    ways.sort(key=lambda way: (way[0], len(way[1])), reverse=True)
    return [(first, second) for _, first, second in ways]
