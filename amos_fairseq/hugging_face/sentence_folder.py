"""The encoder in a folder of sentence-transformers, whose further modules, such as pooling, are not kept."""

import re
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.untrusted import LAST_KEYS, field, read_json

_MODULES, _AGAIN = "modules.json", "download the model again"
_KIND = r"sentence_transformers(\.\w+)+"  # the library imports the class that is named there
_ENCODER = r"sentence_transformers(\.\w+)*\.Transformer"
_FOLDER = r"(\d+_\w+)?"


def find_encoder(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of the encoder, ``path`` itself in a plain folder, and how sentence-transformers uses its states."""
    modules = read_json(path / _MODULES, _AGAIN, list, optional=True, **LAST_KEYS)
    if modules is None:
        return path, []
    try:
        kinds, folders = ([field(module, name, str) for module in modules] for name in ("type", "path"))
        patterns = [_ENCODER, *[_KIND] * len(kinds[1:]), *[_FOLDER] * len(folders)]
        for text, pattern in zip([*kinds, *folders], patterns, strict=True):
            if not re.fullmatch(pattern, text, re.ASCII):
                raise ValueError(f"{text[:80]!a} is not valid")
    except ValueError as error:
        raise UserError(f"{path / _MODULES} is not that of a text encoder ({error}): give its whole folder") from error
    others = [kind.rpartition(".")[2] for kind in kinds[1:]]
    for number, kind in enumerate(others, 1):
        if kind == "Pooling":
            others[number - 1] = f"Pooling ({_pooling(path / folders[number] / 'config.json')})"
    return path / folders[0], [f"sentence-transformers: its files are not kept ({', '.join(others) or 'no pooling'})"]


def _pooling(file: Path) -> str:
    settings = read_json(file, _AGAIN, **LAST_KEYS)
    modes = [
        match[1] for name in settings if (match := re.fullmatch(r"pooling_mode_(\w+)", name)) and settings[name] is True
    ]
    return ", ".join([*modes, *re.findall(r"\w+", str(settings.get("pooling_mode", "")))])[:200]
