"""The pieces of each word of a sentence."""

import bisect
from collections.abc import Sequence

from amos_fairseq.text.tokenization.tokenizer import UNK, Tokenizer


def encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode the text ``" ".join(words)``, and find the pieces of each word by their characters.

    The pieces are those that the exported Hugging Face tokenizer gives for the same text, with one exception: a word of which
    no piece remains (a control character that the tokenizer removes) gets ``<unk>``, so that every word has a first piece.

    A word's range holds the pieces that cover one of its characters. A lone word mark before them covers none. Two words share
    a piece only if the vocabulary has pieces with a space inside.

    Args:
        words: without an empty one.

    Returns:
        The ids of the pieces in the embedding, without ``<s>`` and ``</s>``; and for each word the half-open range of its
        pieces, which is never empty.
    """
    pieces = tokenizer.encode_with_offsets(" ".join(words))
    rows = tokenizer.embedding_rows
    ids = [rows.get(piece, rows[UNK]) for piece, _, _ in pieces]
    starts = [start for _, start, _ in pieces]
    covering = [(index, start, end) for index, (_, start, end) in enumerate(pieces) if start < end]
    ranges: list[tuple[int, int]] = []
    place = num_inserted = begin = 0
    for word in words:
        end = begin + len(word)
        while place < len(covering) and covering[place][2] <= begin:
            place += 1
        stop = place
        while stop < len(covering) and covering[stop][1] < end:
            stop += 1
        if place < stop:
            ranges.append((covering[place][0] + num_inserted, covering[stop - 1][0] + 1 + num_inserted))
        else:
            index = bisect.bisect_left(starts, end) + num_inserted
            ids.insert(index, rows[UNK])
            ranges.append((index, index + 1))
            num_inserted += 1
        begin = end + 1
    return ids, ranges
