"""Tokenizers: read one from a directory with :func:`load_tokenizer`.

A directory contains ``tokenizer.settings.json`` (its ``kind``, whether it is ``cased``), the model file of that kind, and
``dict.txt``, as ``prepare.sh`` and ``Tokenizer.save`` write them; or only a Hugging Face ``tokenizer.json``.
"""

import json
from pathlib import Path
from typing import Any

from amos_fairseq.data.vocabulary import DICTIONARY_FILE, SETTINGS_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.fastbpe_tokenizer import FastBPETokenizer
from amos_fairseq.tokenization.hugging_face_tokenizer import HuggingFaceTokenizer
from amos_fairseq.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer
from amos_fairseq.tokenization.tokenizer import Tokenizer

__all__ = ["KINDS", "Tokenizer", "load_tokenizer"]

KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (SentencePieceTokenizer, FastBPETokenizer, HuggingFaceTokenizer, MicrosoftAmosTokenizer)
}


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Return the tokenizer in ``directory``.

    Raises:
        UserError: there is none, one of its files is missing or broken, or its ``dict.txt`` belongs to another tokenizer.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the tokenizer directory of a corpus or of a run")
    if (directory / SETTINGS_FILE).is_file():
        settings = _read_settings(directory / SETTINGS_FILE)
        try:
            tokenizer = KINDS[settings["kind"]].from_files(directory, settings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{directory / SETTINGS_FILE} has a missing or wrong setting: {error!r}") from error
        tokenizer.check_dictionary(directory / DICTIONARY_FILE)
        return tokenizer
    if (directory / HuggingFaceTokenizer.model_file).is_file():
        return HuggingFaceTokenizer.from_files(directory, {})
    raise UserError(
        f"{directory} holds no tokenizer: expected {SETTINGS_FILE} (written by prepare.sh) or tokenizer.json "
        "(Hugging Face)"
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict) or str(settings.get("kind")) not in KINDS:
        raise UserError(f"{path}: 'kind' must be one of {', '.join(KINDS)}")
    if not isinstance(settings.get("cased"), bool):
        raise UserError(f"{path}: 'cased' must be true or false")
    return settings
