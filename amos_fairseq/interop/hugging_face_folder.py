"""A folder as Hugging Face's libraries write it: ``config.json``, weights, tokenizer. Only its data is read.

No code of the folder runs: JSON, safetensors, and ``pytorch_model.bin`` by a loader that knows tensors alone.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_load_errors
from amos_fairseq.interop.hugging_face import Weights
from amos_fairseq.interop.hugging_face_config import MPNET_BUCKETS, MPNET_MAX_DISTANCE, POSITION_OFFSET
from amos_fairseq.interop.hugging_face_tables import FAMILIES
from amos_fairseq.interop.hugging_face_tokenizer import HuggingFaceTokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
SAFE_WEIGHTS, PICKLED_WEIGHTS = "model.safetensors", "pytorch_model.bin"
_COUNTS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings",
    "embedding_size", "type_vocab_size",
)  # fmt: skip
_SHARES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps")
# What AutoTokenizer can make a tokenizer.json of.
_SLOW_FILES = ("vocab.txt", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Folder:
    """``weights`` in float32, under the names of the file."""

    path: Path
    family: str
    config: "PretrainedConfig"
    weights: Weights

    @property
    def description(self) -> str:
        """Like "electra-small (ElectraForPreTraining)"."""
        classes = ", ".join(self.config.architectures or [f"a {self.family} model"])
        return f"{self.path.resolve().name} ({classes})"


def read_folder(path: Path) -> Folder:
    """Configuration and weights.

    Raises:
        UserError: a file is missing or broken, or the model is none that this package computes.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: give the folder of a Hugging Face model ({CONFIG_FILE}, weights)")
    config = read_config(path / CONFIG_FILE)
    return Folder(path, config.model_type, config, read_weights(path))


def read_config(path: Path) -> "PretrainedConfig":
    """The configuration with the defaults of its class; :class:`UserError` for a model that ours cannot be."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give the whole folder of a Hugging Face model") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    family = content.get("model_type") if isinstance(content, dict) else None
    if family not in FAMILIES:
        raise UserError(f"{path}: model_type {family!r} cannot be imported, only {', '.join(FAMILIES)}")
    wrong = _no_number(content)
    if wrong:
        raise UserError(f"{path}: {wrong} is {content[wrong]!r}, which is no such number: take it from the model again")
    from huggingface_hub.errors import StrictDataclassError  # what transformers 5 raises for a value of a wrong type
    from transformers import BertConfig, ElectraConfig, MPNetConfig, RobertaConfig

    classes = {"mpnet": MPNetConfig, "electra": ElectraConfig, "bert": BertConfig, "roberta": RobertaConfig}
    try:
        config = classes[family].from_dict(content)
    except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} is no configuration of a {family} model ({reason}): take it from the model again"
        ) from error
    problem = _unlike_ours(family, config)
    if problem:
        raise UserError(f"{path}: {problem}, which this package does not compute")
    return config


def _no_number(content: dict[str, Any]) -> str | None:
    """The name of a setting that should be a number and is none. What is absent has the default of its class."""
    for name in _COUNTS:
        value = content.get(name, 1)
        if type(value) is not int or value < 1:
            return name
    return next((name for name in _SHARES if type(content.get(name, 0.0)) not in (int, float)), None)


def _unlike_ours(family: str, config: "PretrainedConfig") -> str | None:
    if config.hidden_act != "gelu":
        return f"hidden_act is {config.hidden_act!r}, not the exact 'gelu'"
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return f"position_embedding_type is {config.position_embedding_type!r}, not 'absolute'"
    # Of transformers 5, only the families that can be decoders have these settings.
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "the model is a decoder"
    if family == "mpnet" and config.relative_attention_num_buckets != MPNET_BUCKETS:
        return f"relative_attention_num_buckets is {config.relative_attention_num_buckets}, not {MPNET_BUCKETS}"
    if POSITION_OFFSET[family] == 2 and config.pad_token_id != 1:
        return f"pad_token_id is {config.pad_token_id}, not 1, so that positions are shifted by another number than 2"
    return None


def read_weights(path: Path) -> Weights:
    """The weights of the folder as float32; :class:`UserError` where there are none or they are broken."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    safe, pickled = path / SAFE_WEIGHTS, path / PICKLED_WEIGHTS
    if safe.is_file():
        try:
            weights = load_file(safe)
        except SafetensorError as error:
            raise UserError(f"{safe} is not a whole safetensors file ({error}): download it again") from error
    elif pickled.is_file():
        with explain_load_errors(str(pickled)):
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
    else:
        hint = "; weights split over several files must be saved as one" if any(path.glob("*.index.json")) else ""
        raise UserError(f"{path} holds neither {SAFE_WEIGHTS} nor {PICKLED_WEIGHTS}: give the whole folder{hint}")
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(f"{pickled} is no state of a model: names and tensors are expected")
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def read_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of the folder; one without ``tokenizer.json`` is converted by ``transformers``.

    Raises:
        UserError: there is none, or it is broken.
    """
    if (path / HuggingFaceTokenizer.model_file).is_file():
        return HuggingFaceTokenizer.from_files(path, {})
    if not any((path / name).is_file() for name in _SLOW_FILES):
        raise UserError(
            f"{path} holds no tokenizer (tokenizer.json, or the vocabulary it is made of): give --tokenizer DIR"
        )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, use_fast=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: its tokenizer cannot be read ({str(error).splitlines()[0]})") from error
    if not slow.is_fast:
        raise UserError(
            f"{path}: no fast tokenizer can be made of its {type(slow).__name__}; convert it to tokenizer.json"
        )
    with tempfile.TemporaryDirectory() as converted:
        slow.save_pretrained(converted)
        return HuggingFaceTokenizer.from_files(Path(converted), {})


def encoder_settings(family: str, config: "PretrainedConfig") -> dict[str, object]:
    """The encoder's settings under the names of our flags."""
    settings: dict[str, object] = {
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "embedding_dim": getattr(config, "embedding_size", config.hidden_size),
        "token_types": getattr(config, "type_vocab_size", 0),
        "max_positions": config.max_position_embeddings - POSITION_OFFSET[family],
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "layer_norm_eps": config.layer_norm_eps,
        "pooler_activation_fn": "gelu" if family == "electra" else "tanh",
        "relative_position_scheme": "t5" if family == "mpnet" else "none",
        "relative_position_buckets": MPNET_BUCKETS,
        "relative_position_max_distance": MPNET_MAX_DISTANCE,
    }
    if settings["embedding_dim"] == config.hidden_size:
        settings["embedding_dim"] = 0  # ours: as wide as the encoder
    return settings
