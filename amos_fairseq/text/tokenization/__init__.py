"""Tokenizers: read one from a directory with :func:`load_tokenizer`.

A directory contains ``tokenizer.json``, ``tokenizer.settings.json`` (its ``kind``, whether it is ``cased``, its special
tokens) and ``dict.txt``, as ``amos prepare`` and ``Tokenizer.save`` write them; or only a Hugging Face ``tokenizer.json``. The
tokenizer of the released AMOS checkpoint has its own ``sp.model`` in place of ``tokenizer.json``.
"""

from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.files import DICTIONARY_FILE, SETTINGS_FILE
from amos_fairseq.text.tokenization.conversion import FASTBPE, FastBPETokenizer, convert
from amos_fairseq.text.tokenization.fast_tokenizer import HUGGING_FACE, SENTENCEPIECE, FastTokenizer
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.tokenizer import COPY_AGAIN, OF_CORPUS, Tokenizer, read_dictionary_symbols
from amos_fairseq.untrusted import read_json

__all__ = ["KINDS", "Tokenizer", "load_tokenizer", "read_tokenizer"]

KINDS: dict[str, type[Tokenizer]] = {
    **dict.fromkeys((SENTENCEPIECE, HUGGING_FACE), FastTokenizer),
    FASTBPE: FastBPETokenizer,
    MicrosoftAmosTokenizer.kind: MicrosoftAmosTokenizer,
}


def read_tokenizer(path: Path, vocabulary: Path | None, lines: list[str]) -> Tokenizer:
    """Read a tokenizer of any form; ``vocabulary`` and ``lines`` as in :func:`convert`."""
    tokenizer = convert(path, vocabulary, lines)
    return load_tokenizer(path) if tokenizer is None else tokenizer


def load_tokenizer(directory: str | Path) -> Tokenizer:
    directory = Path(directory)
    if (directory / SETTINGS_FILE).is_file():
        settings = read_json(directory / SETTINGS_FILE, COPY_AGAIN)
        symbols = read_dictionary_symbols(directory / DICTIONARY_FILE)
        try:
            tokenizer = KINDS[settings["kind"]].from_files(directory, settings)
            if settings.get(OF_CORPUS):
                tokenizer.use_dictionary_of_corpus(directory / DICTIONARY_FILE)
            if symbols == tokenizer.dictionary_symbols:
                return tokenizer
            problem = f"{DICTIONARY_FILE} is of another tokenizer"
        except (AttributeError, KeyError, TypeError) as error:
            problem = repr(error)
        raise UserError(f"{directory} is not readable as a tokenizer ({problem}): {COPY_AGAIN}")
    if (directory / FastTokenizer.model_file).is_file() and not (directory / DICTIONARY_FILE).is_file():
        return FastTokenizer.from_files(directory, {})
    raise UserError(
        f"{directory} holds no tokenizer: expected {SETTINGS_FILE} beside {DICTIONARY_FILE}, or a tokenizer.json of Hugging "
        "Face; amos prepare TEXT --tokenizer FILE, or amos verify DATA --tokenizer FILE, writes such a folder of the other "
        "forms in docs/text.md, such as the file x.model of SentencePiece"
    )
