"""The one way from a directory to a tokenizer.

A directory holds ``tokenizer.settings.json`` (its ``kind``, whether it is ``cased``), the kind's model file and
``dict.txt``, as ``prepare.sh`` and ``Tokenizer.save`` write it; or a bare Hugging Face ``tokenizer.json``.
"""

import json
from pathlib import Path
from typing import Any, Dict, Type, Union

from amos_fairseq.data.vocabulary import DICTIONARY_FILE, SETTINGS_FILE
from amos_fairseq.errors import UserError
from amos_fairseq.interop.fastbpe_tokenizer import FastBPETokenizer
from amos_fairseq.interop.hugging_face_tokenizer import HuggingFaceTokenizer
from amos_fairseq.interop.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.interop.sentencepiece_tokenizer import SentencePieceTokenizer
from amos_fairseq.interop.tokenizer_base import Tokenizer

KINDS: Dict[str, Type[Tokenizer]] = {
    kind.kind: kind for kind in (SentencePieceTokenizer, FastBPETokenizer, HuggingFaceTokenizer, MicrosoftAmosTokenizer)
}


def load_tokenizer(directory: Union[str, Path]) -> Tokenizer:
    """The tokenizer that lies in ``directory``.

    Raises:
        UserError: there is none, a file of it is missing or broken, or its ``dict.txt`` belongs to another one.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the tokenizer directory of a corpus or of a run")
    if (directory / SETTINGS_FILE).is_file():
        settings = _read_settings(directory / SETTINGS_FILE)
        tokenizer = KINDS[settings["kind"]].from_files(directory, settings)
        tokenizer.check_dictionary(directory / DICTIONARY_FILE)
        return tokenizer
    if (directory / HuggingFaceTokenizer.model_file).is_file():
        return HuggingFaceTokenizer.from_files(directory, {})
    raise UserError(
        f"{directory} holds no tokenizer: expected {SETTINGS_FILE} (written by prepare.sh) or tokenizer.json "
        "(Hugging Face)"
    )


def _read_settings(path: Path) -> Dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.get("kind") not in KINDS:
        raise UserError(f"{path}: 'kind' must be one of {', '.join(KINDS)}")
    if not isinstance(settings.get("cased"), bool):
        raise UserError(f"{path}: 'cased' must be true or false")
    return settings


__all__ = ["KINDS", "Tokenizer", "load_tokenizer"]
