"""Tokenizers: read one from a directory with :func:`load_tokenizer`.

A directory contains ``tokenizer.json``, ``tokenizer.settings.json`` (its ``kind``, whether it is ``cased``, its special
tokens) and ``dict.txt``, as ``amos prepare`` and ``Tokenizer.save`` write them; or only a Hugging Face ``tokenizer.json``. The
tokenizer of the released AMOS checkpoint has its own ``sp.model`` in place of ``tokenizer.json``.
"""

from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.files import DICTIONARY_FILE, SETTINGS_FILE
from amos_fairseq.text.tokenization.fast_tokenizer import HUGGING_FACE, SENTENCEPIECE, FastTokenizer
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer
from amos_fairseq.untrusted import read_json

__all__ = ["KINDS", "Tokenizer", "load_tokenizer"]

KINDS: dict[str, type[Tokenizer]] = {
    **dict.fromkeys((SENTENCEPIECE, HUGGING_FACE), FastTokenizer),
    MicrosoftAmosTokenizer.kind: MicrosoftAmosTokenizer,
}


def load_tokenizer(directory: str | Path) -> Tokenizer:
    directory = Path(directory)
    if (directory / SETTINGS_FILE).is_file():
        settings = read_json(directory / SETTINGS_FILE, "copy the tokenizer directory again")
        try:
            tokenizer = KINDS[settings["kind"]].from_files(directory, settings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{directory / SETTINGS_FILE} has a missing or wrong setting: {error!r}") from error
        tokenizer.check_dictionary(directory / DICTIONARY_FILE)
        return tokenizer
    if (directory / FastTokenizer.model_file).is_file() and not (directory / DICTIONARY_FILE).is_file():
        return FastTokenizer.from_files(directory, {})
    raise UserError(
        f"{directory} holds no tokenizer: expected {SETTINGS_FILE} beside {DICTIONARY_FILE} (written by amos prepare), or a "
        "tokenizer.json of Hugging Face"
    )
