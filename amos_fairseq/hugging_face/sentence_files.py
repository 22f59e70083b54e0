"""The files with which sentence-transformers makes one vector of a text: pooling, normalization, longest text, prompts.

Those of an imported model are read at import, and written again at export. Between the two they are a buffer of the pretraining
model, their JSON as uint8, which is saved with the weights: a folder comes back as it was, also after further pretraining. A
classification head on the mean of all states is exported as modules of that library.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.weights import Weights
from amos_fairseq.strangers import LAST_KEYS, field, parse_json, read_json

_MODULES, _TRANSFORMER, _PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_CONFIG_OF_MODULE = r"\d+_\w+/config\.json"
_DENSE_WEIGHTS = "model.safetensors"
_POOLING_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
# Of the dense layer of our heads; the library imports the class by its name.
_ACTIVATIONS = {"tanh": nn.Tanh, "gelu": nn.GELU}
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


def longest_of(files: Tensor | None) -> int | None:
    """Return the tokens at which sentence-transformers cuts a text; None where these files do not say it."""
    content = {} if files is None else parse_json(bytes(files.tolist())).get(_TRANSFORMER)
    length = content.get("max_seq_length") if isinstance(content, dict) else None
    return length if type(length) is int else None


def _modes_of(pooling: dict[str, Any]) -> list[str]:
    modes = [re.fullmatch(r"pooling_mode_(\w+)", name) for name, is_used in pooling.items() if is_used is True]
    return [match[1] for match in modes if match] + re.findall(r"\w+", str(pooling.get("pooling_mode", "")))


def write_sentence_files(folder: Path, files: Tensor) -> None:
    try:
        content = parse_json(bytes(files.tolist()))
        _kinds_and_folders(content[_MODULES])
        _write(folder, content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(_DAMAGED.format(error)) from error


def write_sentence_classifier(folder: Path, head: Weights, activation: str, longest: int) -> None:
    """Write a classification head on the mean of all states as the modules Pooling and Dense.

    ``SentenceTransformer(folder).encode(texts)`` then returns the logits. ``longest``: tokens of an input.
    """
    layers = [("output", nn.Identity)]
    if "classification_head.dense.weight" in head:
        layers.insert(0, ("dense", _ACTIVATIONS[activation]))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    width = head["classification_head.output.weight"].size(1)
    pooling = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in _POOLING_MODES}
    files: dict[str, Any] = {
        _TRANSFORMER: {"max_seq_length": longest, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling},
    }
    for layer, function in layers:
        path = f"{len(modules)}_Dense"
        modules.append(("Dense", path))
        matrix, bias = (head[f"classification_head.{layer}.{end}"].contiguous() for end in ("weight", "bias"))
        files[f"{path}/config.json"] = {
            "in_features": matrix.size(1),
            "out_features": matrix.size(0),
            "bias": True,
            "activation_function": f"{function.__module__}.{function.__name__}",
        }
        (folder / path).mkdir()
        (folder / path / _DENSE_WEIGHTS).write_bytes(save({"linear.weight": matrix, "linear.bias": bias}))
    files[_MODULES] = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    _write(folder, files)


class SentenceClassifier(nn.Module):
    """What ``SentenceTransformer`` computes with the files of :func:`write_sentence_classifier`, in plain PyTorch."""

    def __init__(self, encoder: nn.Module, folder: Path) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, nn.Sequential()
        for path in sorted(folder.glob("*_Dense")):
            settings = read_json(path / "config.json", _AGAIN)
            layer = nn.Linear(settings["in_features"], settings["out_features"])
            weights = load_file(path / _DENSE_WEIGHTS)
            layer.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
            self.layers.extend([layer, getattr(nn, settings["activation_function"].rpartition(".")[2])()])

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> SimpleNamespace:
        """[B,T] of 1 and 0, and the other inputs of the encoder -> ``logits`` [B, classes]."""
        states = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        return SimpleNamespace(logits=self.layers((states * weights).sum(1) / weights.sum(1)))


def _write(folder: Path, files: dict[str, Any]) -> None:
    for name, settings in files.items():
        file = folder / _matching(f"({_MODULES}|{_TRANSFORMER}|{_PROMPTS}|{_CONFIG_OF_MODULE})", name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _kinds_and_folders(modules: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the classes and folders of ``modules.json``: sentence-transformers imports the class that is named there."""
    kinds = [_matching(r"sentence_transformers(?:\.\w+)*\.(\w+)", field(module, "type", str)) for module in modules]
    return kinds, [_matching(r"((?:\d+_\w+)?)", field(module, "path", str)) for module in modules]


def _matching(pattern: str, text: str) -> str:
    """Return the first group of ``pattern``; raise ``ValueError`` where ``text`` is something else."""
    if (match := re.fullmatch(pattern, text, re.ASCII)) is None:
        raise ValueError(f"{text[:80]!a} is not valid")
    return match[1]
