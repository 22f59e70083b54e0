"""Which entries of a fairseq dictionary are no text: known to datasets, models and tools alike."""

from fairseq.data import Dictionary

MASK_SYMBOL = "<mask>"
# What fairseq-preprocess --padding-factor appends to a dictionary to round its size; no text holds it.
DICTIONARY_FILLER = "madeupword"


def special_ids(dictionary: Dictionary) -> list[int]:
    """Ids that are never masked, never a target and never sampled, ascending.

    fairseq's own ``<s> <pad> </s> <unk>``, ``<mask>``, and the filler words that round up a dictionary's size.
    """
    named = {dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), dictionary.index(MASK_SYMBOL)}
    filler = {index for index, symbol in enumerate(dictionary.symbols) if symbol.startswith(DICTIONARY_FILLER)}
    return sorted(named | filler)
