"""How one or two texts are shortened to the length that a model reads.

Only Python's own objects: exported folders with code contain a copy of this file.
"""

from collections.abc import Sequence


def kept_lengths(lengths: Sequence[int], limit: int) -> list[int]:
    """Return how many tokens of one or two texts remain if together they may have ``limit``: the longer text is cut first.

    If both must be cut, each keeps half. Of an odd limit the longer text keeps the larger half, of equal texts the second.
    This is ``longest_first`` of Hugging Face's fast tokenizers; their slow ones leave the larger half to the first text.

    Args:
        lengths: number of tokens of each text, without special tokens.
        limit: number of tokens, at least 0, without special tokens.
    """
    if sum(lengths) <= limit:
        return list(lengths)
    if len(lengths) == 1:
        return [limit]
    first, second = lengths
    kept = min(first, second, limit // 2)
    return [kept, limit - kept] if first <= second else [limit - kept, kept]
