"""The encoder in a folder of sentence-transformers, whose further modules, such as pooling, are not kept."""

import re
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import LAST_KEYS, field, read_json

_MODULES, _AGAIN = "modules.json", "download the model again"
_KIND = r"sentence_transformers(?:\.\w+)*\.(\w+)"  # the library imports the class that is named there
_FOLDER = r"(?:\d+_\w+)?"


def find_encoder(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of the encoder, ``path`` itself in a plain folder, and how sentence-transformers uses its states."""
    modules = read_json(path / _MODULES, _AGAIN, list, optional=True, **LAST_KEYS)
    if modules is None:
        return path, []
    try:
        kinds = [re.fullmatch(_KIND, field(module, "type", str), re.ASCII) for module in modules]
        folders = [field(module, "path", str) for module in modules]
        if not all([*kinds, *(re.fullmatch(_FOLDER, folder, re.ASCII) for folder in folders)]):
            raise ValueError("a class or a folder is not one of sentence-transformers")
        first, *others = [kind[1] for kind in kinds]
        if first != "Transformer":
            raise ValueError(f"its first module is {first:.80}, and only text encoders are read")
    except ValueError as error:
        raise UserError(f"{path / _MODULES}: {error}: {_AGAIN}") from error
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
