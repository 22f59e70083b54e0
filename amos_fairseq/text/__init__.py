"""Raw text to tokens, behind ``amos prepare text``: readers of files, the vocabulary, tokenizers, binarizing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# Pieces to learn. AMOS, section 4: 32,768 uncased (base), 64,000 cased SentencePiece (base++).
DEFAULT_VOCAB_SIZE = 32_768
LARGEST_VOCABULARY = 2**22  # four times the largest known; each entry takes memory

MASK_SYMBOL = "<mask>"
# fairseq-preprocess --padding-factor appends symbols with this prefix to round up the dictionary's size.
DICTIONARY_FILLER = "madeupword"


def special_ids(dictionary: "Dictionary") -> list[int]:
    """Return the ids that are never masked, never a target and never sampled, in ascending order.

    They are fairseq's ``<s> <pad> </s> <unk>``, ``<mask>``, the filler symbols that round up a dictionary's size, and the
    protected tokens of the tokenizer, which a task stores as ``protected_symbols`` of its dictionary.
    """
    named = {dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), dictionary.index(MASK_SYMBOL)}
    filler = {index for index, symbol in enumerate(dictionary.symbols) if symbol.startswith(DICTIONARY_FILLER)}
    return sorted({*named, *filler, *map(dictionary.index, getattr(dictionary, "protected_symbols", ()))})
