"""Read a Hugging Face model folder: ``config.json``, weights, tokenizer.

The folder may come from a stranger. No code of it runs: JSON, safetensors, and ``pytorch_model.bin`` by a loader that accepts
only tensors.
"""

import os
import reprlib
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amos_fairseq.checkpoint_files import explain_load_errors
from amos_fairseq.checkpoints.write import Weights
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.convert import global_every, rope_parameters, their_config_class
from amos_fairseq.hugging_face.families import (
    CONFIG_FILE,
    CUSTOM,
    FAMILIES,
    MPNET_BUCKETS,
    POSITION_OFFSET,
    SAME_AS,
    WEIGHTS_FILE,
    PartKind,
)
from amos_fairseq.strangers import finite_number, plain_name, read_json, whole_number
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PICKLED_WEIGHTS_FILE = "pytorch_model.bin"
# AutoTokenizer can build a tokenizer.json from one of these.
_SLOW_TOKENIZER_FILES = ("vocab.txt", "vocab.json", "tokenizer_config.json")
_INTEGER_SETTINGS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "embedding_size",
    "type_vocab_size",
    "n_layers",
    "dim",
    "hidden_dim",
    "n_heads",
    "local_attention",
    "global_attn_every_n_layers",
)
_FLOAT_SETTINGS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "layer_norm_eps",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "norm_eps",
)
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
# transformers creates a name for each label.
MOST_LABELS = 1_000_000
# Tensors of a file may share values, as tied layers do; more of them than this in one file would exhaust the memory.
MOST_SHARED = 8
# Model types with another kind of encoder -> what this package does not compute.
_OTHER_ENCODERS = {
    "deberta": "disentangled attention",
    "deberta-v2": "disentangled attention",
    "albert": "one layer that is applied several times",
}


@dataclass(frozen=True)
class Folder:
    """Configuration and weights of a folder; ``weights`` are float32, under the names of the file."""

    path: Path
    family: str
    config: "PretrainedConfig"
    weights: Weights

    @property
    def description(self) -> str:
        """Such as "electra-small (ElectraForPreTraining)"."""
        classes = ", ".join(self.config.architectures or [f"a {self.family} model"])
        return f"{self.path.resolve().name} ({classes})"

    def has_head(self, part: PartKind) -> bool:
        """Return whether the weights include this head, or some of its weights."""
        heads = FAMILIES[self.family].heads
        # The dense layer and LayerNorm with which every head of ModernBERT begins.
        in_all = set.intersection(*({row.theirs for row in rows} for rows in heads.values()))
        prefixes = {str(row.theirs).removesuffix("*") for row in heads[part] if row.theirs not in in_all}
        return any(name.startswith(prefix) for name in self.weights for prefix in prefixes)


def read_folder(path: Path) -> Folder:
    """Read configuration and weights; raise :class:`UserError` if they are broken or this package cannot compute them."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give the folder of a Hugging Face model ({CONFIG_FILE}, weights)")
    family, config = read_config(path / CONFIG_FILE)
    return Folder(path, family, config, read_weights(path))


def read_config(path: Path) -> tuple[str, "PretrainedConfig"]:
    """Return the family, and the configuration with the defaults of its class.

    Raises:
        UserError: the file is missing or invalid, or describes a model that is not supported.
    """
    content = _read_config_file(path)
    family = str(content.get("model_type"))
    family = SAME_AS.get(family, family)
    known = [name for name in (*FAMILIES, *SAME_AS) if name != CUSTOM]
    if family not in known:
        other = f" (it has {_OTHER_ENCODERS[family]}, another kind of encoder)" if family in _OTHER_ENCODERS else ""
        raise UserError(f"{path}: model_type {reprlib.repr(family)} cannot be imported{other}, only {', '.join(known)}")
    if family == "modernbert" and content.get("num_hidden_layers", 1) > MOST_LAYERS:  # their class makes a list of them
        raise UserError(f"{path}: num_hidden_layers is above {MOST_LAYERS:,}: take the file from the model again")
    try:
        config = their_config_class(family).from_dict(content)
    except Exception as error:  # transformers raises whatever its code meets: IndexError, its own classes
        reason = _reason(error)
        raise UserError(
            f"{path} is not a configuration of a {family} model ({reason}): take it from the model again"
        ) from error
    problem = _unsupported_setting(family, config)
    if problem:
        raise UserError(f"{path}: {problem}, which this package does not compute")
    return family, config


def _read_config_file(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json`` with valid values. Settings that are absent have the default of their class."""
    content = read_json(path, "give the whole folder of a Hugging Face model")
    content.pop("attribute_map", None)  # gives settings other names, so that what is checked would not be what is used
    try:
        for setting in _INTEGER_SETTINGS:
            whole_number(content.get(setting, 1), 1, LARGEST_SIZE)
        for setting in _FLOAT_SETTINGS:
            finite_number(content.get(setting, 0.0), 0, 1)
        setting = "num_labels"
        whole_number(content.get(setting, 2), 0, MOST_LABELS)
        setting = "architectures"
        if not isinstance(content.get(setting), list | None):
            raise ValueError
        for architecture in content.get(setting) or []:
            plain_name(architecture, longest=200)
    except ValueError as error:
        raise UserError(
            f"{path}: {setting} is {reprlib.repr(content[setting])}, which is not valid: take the file from the model again"
        ) from error
    return content


def _reason(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")


def _unsupported_modern_setting(config: "PretrainedConfig") -> str | None:
    for name in ("hidden_activation", "classifier_activation"):
        if getattr(config, name) != "gelu":
            return f"{name} is {reprlib.repr(getattr(config, name))}, not the exact 'gelu'"
    for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        if getattr(config, name):
            return f"{name} is {reprlib.repr(getattr(config, name))}, not false"
    if not config.decoder_bias:
        return "decoder_bias is false, not true"
    if global_every(config) is None:
        return "layer_types do not repeat: every n-th layer, from the first on, must be full_attention"
    for kind, rope in rope_parameters(config).items():
        if rope.get("rope_type", "default") != "default" or rope.keys() - {"rope_type", "rope_theta"}:
            return f"rope_parameters of {kind} are {reprlib.repr(rope)}, not of the type 'default'"
        try:
            finite_number(rope.get("rope_theta"), 1, LARGEST_SIZE)
        except ValueError:
            return f"rope_theta of {kind} is {reprlib.repr(rope.get('rope_theta'))}, not a number from 1 on"
    if config.local_attention < 2 or config.local_attention % 2:
        return f"local_attention is {config.local_attention}, not an even number from 2 on"
    return None


def _unsupported_setting(family: str, config: "PretrainedConfig") -> str | None:
    if family == "modernbert":
        return _unsupported_modern_setting(config)
    activation = "activation" if family == "distilbert" else "hidden_act"
    if getattr(config, activation) != "gelu":
        return f"{activation} is {reprlib.repr(getattr(config, activation))}, not the exact 'gelu'"
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return f"position_embedding_type is {reprlib.repr(config.position_embedding_type)}, not 'absolute'"
    # In transformers 5, only families that can be decoders have these settings.
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "the model is a decoder"
    if family == "mpnet" and config.relative_attention_num_buckets != MPNET_BUCKETS:
        return f"relative_attention_num_buckets is {config.relative_attention_num_buckets}, not {MPNET_BUCKETS}"
    if POSITION_OFFSET[family] == 2 and config.pad_token_id != 1:
        return f"pad_token_id is {config.pad_token_id}, not 1, so that positions are shifted by another number than 2"
    return None


def read_weights(path: Path) -> Weights:
    """Return the weights of the folder, in one or several files, as float32.

    Raises:
        UserError: there are none, or they are broken or incomplete.
    """
    for name in (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE):
        file, index = path / name, path / f"{name}.index.json"
        if file.is_file():
            return _read_weight_file(file)
        if index.is_file():
            return _read_shards(index)
    raise UserError(
        f"{path} holds neither {WEIGHTS_FILE} nor {PICKLED_WEIGHTS_FILE}, nor an index of several files: give the whole folder"
    )


def _read_shards(index: Path) -> Weights:
    """Return the weights of all files that an index names: ``{"weight_map": {name of a weight: name of a file}}``."""
    file_of = read_json(index, "download it again").get("weight_map")
    try:
        shards = sorted({Path(plain_name(file)).name for file in file_of.values()})  # files of this folder alone
    except (ValueError, AttributeError) as error:
        raise UserError(f"{index} is not an index of weights: download it again") from error
    weights: Weights = {}
    for shard in shards:
        if not os.path.isfile(index.parent / shard):  # False also for a name that no file can have
            raise UserError(f"{index.parent / shard} is missing, which {index.name} names: give the whole folder")
        weights |= _read_weight_file(index.parent / shard)
    absent = sorted(file_of.keys() - weights.keys())
    if absent:
        raise UserError(f"{index}: the weight {absent[0]} is in none of its files: download them again")
    return weights


def _read_weight_file(file: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        try:
            weights = load_file(file)
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}): download it again") from error
        except (OSError, MemoryError) as error:  # the whole file is mapped
            raise UserError(f"{file} cannot be read ({error}): download it again, or free some memory") from error
    else:
        with explain_load_errors(str(file)):
            weights = torch.load(file, map_location="cpu", weights_only=True)
    _check_weights(file, weights)
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}


def _check_weights(file: Path, weights: Any) -> None:
    """Raise :class:`UserError` unless this is a state of names and plain tensors that are not larger than their file."""
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(f"{file} is not the state of a model: names and tensors are expected")
    for key, tensor in weights.items():
        try:
            plain_name(key)
        except ValueError as error:
            raise UserError(f"{file} is not the state of a model (the name of a weight: {error})") from error
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
            kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}".replace("torch.", "")
            raise UserError(f"{file}: the weight {key} has no plain numbers ({kind}): save the model as float32")
    # A view can repeat a single value any number of times.
    if sum(tensor.nbytes for tensor in weights.values()) > MOST_SHARED * file.stat().st_size:
        raise UserError(f"{file} has tensors of more values than it stores: save the model again, as safetensors")


def read_folder_tokenizer(path: Path) -> FastTokenizer:
    """Return the tokenizer of the folder; ``transformers`` converts one without ``tokenizer.json``.

    Raises :class:`UserError` if there is none, or it is broken.
    """
    if os.path.lexists(path / FastTokenizer.model_file):
        return FastTokenizer.from_files(path, {})
    if not any((path / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        raise UserError(
            f"{path} holds no tokenizer (tokenizer.json, or the vocabulary to build it from): give --tokenizer DIR"
        )
    if os.path.lexists(path / CONFIG_FILE):  # AutoTokenizer reads it too
        _read_config_file(path / CONFIG_FILE)
    for file in path.iterdir():
        if not (file.is_dir() or os.path.isfile(file)):  # such as a pipe, which has no end
            raise UserError(f"{file} is a pipe, a device or a broken link: remove it, or give --tokenizer DIR")
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as converted:
        try:
            slow = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, use_fast=True)
            is_fast = getattr(slow, "is_fast", False)  # RagTokenizer contains two tokenizers and is none
            if is_fast:
                slow.save_pretrained(converted)
        except Exception as error:  # each of its classes reads files in its own way, and raises what its code meets
            raise UserError(f"{path}: its tokenizer cannot be read ({_reason(error)})") from error
        if not is_fast:
            raise UserError(
                f"{path}: its {type(slow).__name__} cannot be converted to a fast tokenizer; convert it to tokenizer.json"
            )
        return FastTokenizer.from_files(Path(converted), {})
