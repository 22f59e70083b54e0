"""The files with which sentence-transformers makes one vector of a text: pooling, normalization, longest text, prompts.

They are read at import, and written again at export. Between the two they are a buffer of the pretraining model, their JSON as
uint8, which is saved with the weights: a folder comes back as it was, also after further pretraining.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import LAST_KEYS, field, parse_json, read_json

_MODULES, _TRANSFORMER, _PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_CONFIG_OF_MODULE = r"\d+_\w+/config\.json"
_AGAIN = "download the model again"
_DAMAGED = "the checkpoint's sentence-transformers files are damaged ({}): import again"


def read_sentence_files(path: Path) -> tuple[Path, Tensor | None, list[str]]:
    """Return the folder of the encoder, the files (None where ``path`` is no whole sentence-transformers folder), remarks."""
    modules = read_json(path / _MODULES, _AGAIN, list, optional=True, **LAST_KEYS)
    if modules is None:
        return path, None, []
    try:
        kinds, folders = _kinds_and_folders(modules)
    except ValueError as error:
        raise UserError(f"{path / _MODULES}: {error}: {_AGAIN}") from error
    if kinds[:1] != ["Transformer"]:
        raise UserError(f"{path} is a sentence-transformers model of {', '.join(kinds)}: only text encoders are read")
    encoder = path / folders[0]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        left_out = ", ".join(kinds[1:]) or "no pooling"
        remark = f"sentence-transformers: left out ({left_out}), because only pooling and normalization are kept"
        return encoder, None, [remark]
    pooling = read_json(path / folders[1] / "config.json", _AGAIN, **LAST_KEYS)
    settings = next(
        (read_json(file, _AGAIN, **LAST_KEYS) for file in sorted(encoder.glob("sentence_*_config.json"))), {}
    )
    files = {
        _MODULES: [modules[0] | {"path": ""}, *modules[1:]],
        f"{folders[1]}/config.json": pooling,
        _TRANSFORMER: settings,
        _PROMPTS: read_json(path / _PROMPTS, _AGAIN, optional=True, **LAST_KEYS) or {},
    }
    remark = f"sentence-transformers: {', '.join([*_modes_of(pooling), *kinds[2:]])}; amos export writes it again"
    return encoder, torch.tensor(list(json.dumps(files).encode()), dtype=torch.uint8), [remark]


def pooling_of(files: Tensor | None) -> str:
    """Return how these files pool, in the words of ``Features.pooled``; ``mean`` without any."""
    if files is None:
        return "mean"
    try:
        content = parse_json(bytes(files.tolist()))
        pooling = next(settings for name, settings in content.items() if re.fullmatch(_CONFIG_OF_MODULE, name))
        modes = _modes_of(pooling) or ["mean"]
    except (ValueError, TypeError, StopIteration, AttributeError) as error:
        raise UserError(_DAMAGED.format(error)) from error
    # The mean times the square root of the length has the direction of the mean.
    known = {
        "mean": "mean",
        "mean_tokens": "mean",
        "mean_sqrt_len_tokens": "mean",
        "cls": "first",
        "cls_token": "first",
    }
    kinds = {known.get(mode) for mode in modes}
    if len(kinds) > 1 or None in kinds:
        advice = "leave --check-similarity out"
        raise UserError(f"the model pools by {', '.join(modes)}; only mean and cls are computed here: {advice}")
    return kinds.pop()


def _modes_of(pooling: dict[str, Any]) -> list[str]:
    modes = [re.fullmatch(r"pooling_mode_(\w+)", name) for name, is_used in pooling.items() if is_used is True]
    return [match[1] for match in modes if match] + re.findall(r"\w+", str(pooling.get("pooling_mode", "")))


def write_sentence_files(folder: Path, files: Tensor) -> None:
    try:
        content = parse_json(bytes(files.tolist()))
        _kinds_and_folders(content[_MODULES])
        for name, settings in content.items():
            file = folder / _matching(f"({_MODULES}|{_TRANSFORMER}|{_PROMPTS}|{_CONFIG_OF_MODULE})", name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(_DAMAGED.format(error)) from error


def _kinds_and_folders(modules: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the classes and folders of ``modules.json``: sentence-transformers imports the class that is named there."""
    kinds = [_matching(r"sentence_transformers(?:\.\w+)*\.(\w+)", field(module, "type", str)) for module in modules]
    return kinds, [_matching(r"((?:\d+_\w+)?)", field(module, "path", str)) for module in modules]


def _matching(pattern: str, text: str) -> str:
    """Return the first group of ``pattern``; raise ``ValueError`` where ``text`` is something else."""
    if (match := re.fullmatch(pattern, text, re.ASCII)) is None:
        raise ValueError(f"{text[:80]!a} is not valid")
    return match[1]
