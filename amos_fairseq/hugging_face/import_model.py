"""Import a Hugging Face model folder (``config.json``, weights, tokenizer) as a pretraining model of this package.

No code of the folder runs: JSON, safetensors, and ``pytorch_model.bin`` by a loader that accepts only tensors.
"""

import os
import re
import reprlib
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amos_fairseq.checkpoint_files import explain_load_errors
from amos_fairseq.checkpoints.write import (
    Imported,
    Weights,
    build_model,
    check_rows,
    configuration,
    count_layers,
    fill,
)
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.convert import (
    encoder_settings,
    from_hugging_face,
    global_every,
    rope_parameters,
    their_config_class,
)
from amos_fairseq.hugging_face.families import (
    CONFIG_FILE,
    CUSTOM,
    DETECTION_LABELS,
    FAMILIES,
    MPNET_BUCKETS,
    POSITION_OFFSET,
    SAME_AS,
    WEIGHTS_FILE,
    PartKind,
)
from amos_fairseq.models.configuration import MODERN, MODERN_ARCH, MODERN_SIZES, SIZES
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.strangers import finite_number, plain_name, read_json, whole_number
from amos_fairseq.tokenization.fast_tokenizer import ABSENT, FastTokenizer, row_map
from amos_fairseq.tokenization.tokenizer import embedding_symbols

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

_GENERATOR = "generator."  # ELECTRA's second network in our model
_SHARED_BY_ELECTRA = ("embed_positions.", "embed_token_types.", "embedding_norm.")
# ElectraModel cannot build a generator in which these differ from the discriminator.
_EQUAL_IN_BOTH = ("num_hidden_layers", "embedding_size", "layer_norm_eps", "max_position_embeddings", "type_vocab_size")


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


def import_folder(
    path: Path, arch: str | None = None, generator: Path | None = None, tokenizer: Path | None = None, seed: int = 1
) -> Imported:
    """Convert a folder, and ELECTRA's generator from a second folder, to a model of this package.

    Args:
        path: an MPNet, ELECTRA (discriminator), BERT, DistilBERT, RoBERTa, XLM-R or ModernBERT folder.
        arch: an architecture, such as amos_base. Sizes come from the folder, settings that it lacks (generator, depths) from
            the architecture. For the default see :func:`default_arch`.
        generator: folder of an ``ElectraForMaskedLM`` with the same embeddings; for ``electra_*`` only.
        tokenizer: folder of the tokenizer, if it is another.
        seed: of the initial values of what the folder lacks.

    Raises:
        UserError: a file is missing, or the model cannot be represented.
    """
    folder = read_folder(path)
    arch = arch or default_arch(folder)
    objective = arch.partition("_")[0]
    if generator is not None and objective != "electra":
        raise UserError(
            f"--generator cannot be used with --arch {arch}, whose generator is newly initialized; give --arch electra_base"
        )
    folder_tokenizer = read_folder_tokenizer(tokenizer or path)
    ids = row_map(folder_tokenizer)
    settings = encoder_settings(folder.family, folder.config)
    generator_folder = None if generator is None else read_generator(folder, generator)
    if generator_folder is not None:
        settings["generator_size"] = generator_folder.config.hidden_size / folder.config.hidden_size
    config = configuration(arch, settings, folder.description)

    head = head_to_import(folder, objective)
    weights, unexpected_keys = from_hugging_face(folder.family, folder.weights, [head] if head else [])
    check_sizes(path, settings, weights)
    check_rows(ids, len(weights["embed_tokens.weight"]))
    if generator_folder is not None:
        others = from_hugging_face("electra", generator_folder.weights, [PartKind.MASKED_LM])
        check_sizes(generator, encoder_settings("electra", generator_folder.config), others.weights)
        check_shared_embeddings(weights, others.weights, generator)
        weights = {**weights, **generator_weights(others.weights)}
        unexpected_keys = unexpected_keys + [f"{generator}: {name}" for name in others.unexpected_keys]
    try:
        model = build_model(config, folder_tokenizer, seed)
    except UserError as error:
        raise UserError(
            f"{path / CONFIG_FILE}, with --arch {arch} for what it lacks, cannot be used: {error}"
        ) from error
    remarks = vocabulary_remarks(folder_tokenizer.dictionary_symbols, ids, len(weights["embed_tokens.weight"]))
    prefix = encoder_prefix(model)
    newly_initialized = fill(model, in_network(weights, prefix), ids)
    check_encoder_is_complete(newly_initialized, prefix, path)
    return Imported(config, model, folder_tokenizer, folder.description, newly_initialized, unexpected_keys, remarks)


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


def default_arch(folder: Folder) -> str:
    """Return the objective of the folder's head (ELECTRA, or MLM), else AMOS, in the size with this width, else base."""
    width, sizes = folder.config.hidden_size, SIZES
    if folder.family == "modernbert":
        sizes = {f"{MODERN_ARCH}_{size}": settings for size, settings in MODERN_SIZES.items()}
    base = next(size for size in sizes if size.endswith("base"))
    size = next((size for size, settings in sizes.items() if settings["encoder_embed_dim"] == width), base)
    if folder.family == "electra":
        return f"electra_{size}"
    return f"mlm_{size}" if folder.has_head(PartKind.MASKED_LM) else f"amos_{size}"


def head_to_import(folder: Folder, objective: str) -> PartKind | None:
    """Return the head of the folder that the objective continues to train, if there is one."""
    if objective == "mlm":
        return PartKind.MASKED_LM if folder.has_head(PartKind.MASKED_LM) else None
    if objective == "electra" and folder.family != "modernbert":
        return PartKind.PRETRAINING if folder.family == "electra" and folder.has_head(PartKind.PRETRAINING) else None
    labels = {int(number): label for number, label in (folder.config.id2label or {}).items()}
    return (
        PartKind.DETECTION
        if objective in ("amos", "electra") and labels == DETECTION_LABELS and folder.has_head(PartKind.DETECTION)
        else None
    )


def check_sizes(path: Path, settings: dict[str, Any], weights: Weights) -> None:
    """Raise :class:`UserError` if the configuration gives other sizes than the weights, before a model has these sizes."""
    width, layers = settings["encoder_embed_dim"], settings["encoder_layers"]
    num_layers = count_layers(weights, "encoder.layers.")
    problem = f"they have {num_layers} layers, the configuration says {layers}" if layers != num_layers else ""
    first, is_modern = "encoder.layers.0.", settings.get("encoder") == MODERN
    embedding_width = settings["embedding_dim"] or width
    expected = {
        "embed_tokens.weight": [len(weights["embed_tokens.weight"]), embedding_width],
        "encoder.embed_positions.weight": [settings["max_positions"], embedding_width],
        "encoder.embed_token_types.weight": [settings["token_types"], embedding_width],
        f"{first}attention.query_key_value.weight": [3 * width, width],
        f"{first}ffn_in.weight": [settings["encoder_ffn_embed_dim"] * (2 if is_modern else 1), width],
    }
    for key, tensor in weights.items():
        same = re.sub(r"^encoder\.layers\.\d+\.", first, key)  # all layers are as large as the first
        shape = list(tensor.shape)
        if not problem and shape != expected.setdefault(same, shape):
            problem = f"{key} is {shape}, the configuration says {expected[same]}"
    if problem:
        raise UserError(
            f"{path}: the weights do not fit their configuration: {problem}; take both files from the same model"
        )


def read_generator(folder: Folder, path: Path) -> Folder:
    """Read ELECTRA's generator; raise :class:`UserError` if it does not belong to the discriminator in ``folder``."""
    generator = read_folder(path)
    if generator.family != "electra" or folder.family != "electra":
        raise UserError(f"--generator {path}: only two ELECTRA models share their embeddings; leave it out")
    here, there = folder.config, generator.config
    for name in _EQUAL_IN_BOTH:
        if getattr(here, name) != getattr(there, name):
            raise UserError(
                f"--generator {path}: {name} is {getattr(there, name)}, in {folder.path} {getattr(here, name)}; give the "
                "generator that was trained with this discriminator"
            )
    size = there.hidden_size / here.hidden_size
    for name in ("intermediate_size", "num_attention_heads"):
        if round(getattr(here, name) * size) != getattr(there, name):
            raise UserError(
                f"--generator {path}: its width is {size:.3g} of the discriminator's, its {name} is not; a generator here has "
                "a single relative size, so this one cannot be imported"
            )
    return generator


def check_shared_embeddings(discriminator: Weights, generator: Weights, path: Path) -> None:
    """Raise :class:`UserError` if the embeddings of both folders differ: our model has one table for both."""
    shared = tuple(f"encoder.{prefix}" for prefix in _SHARED_BY_ELECTRA)
    names = ("embed_tokens.weight", *(name for name in discriminator if name.startswith(shared)))
    differing = [name for name in names if not torch.equal(discriminator[name], generator[name])]
    if differing:
        raise UserError(
            f"--generator {path}: {', '.join(differing)} differ from the discriminator's, and an electra model here shares "
            "them; leave --generator out to import the discriminator with a newly initialized generator"
        )


def generator_weights(weights: Weights) -> Weights:
    """Return the weights that only the generator has, under their names in the model."""
    shared = ("embed_tokens.", *(f"encoder.{prefix}" for prefix in _SHARED_BY_ELECTRA))
    return in_network({name: tensor for name, tensor in weights.items() if not name.startswith(shared)}, _GENERATOR)


def in_network(weights: Weights, prefix: str) -> Weights:
    """Return the weights with ``prefix`` in the names of the encoder, where one of our models has several networks."""
    return {re.sub(r"^encoder\.", prefix, name): tensor for name, tensor in weights.items()}


def encoder_prefix(model: PretrainingModel) -> str:
    """Return the prefix of the names of the model's encoder, such as ``discriminator.``"""
    return next(name for name, part in model.named_modules() if part is model.encoder) + "."


def check_encoder_is_complete(newly_initialized: list[str], prefix: str, path: Path) -> None:
    """Raise :class:`UserError` if a weight of the encoder would start from random values."""
    missing = [name for name in newly_initialized if name.startswith(prefix)]
    if missing:
        raise UserError(
            f"{path}: its configuration describes more than its weights hold ({missing[0].removeprefix(prefix)} is missing); "
            "take both files from the same model"
        )


def vocabulary_remarks(symbols: list[str], ids: Tensor, num_rows: int) -> list[str]:
    """Describe the vocabulary rows that have no token in the folder or in our dictionary."""
    remarks = []
    dictionary = embedding_symbols(symbols)
    absent = [dictionary[row] for row in (ids == ABSENT).nonzero().flatten().tolist()]
    if absent:
        remarks.append(
            f"the tokenizer has no {' and no '.join(absent)}: that row of the vocabulary is newly initialized"
        )
    unused = sorted(set(range(num_rows)) - set(ids.tolist()))  # a vocabulary that was rounded up
    if unused:
        shown = ", ".join(map(str, unused[:5])) + (", ..." if len(unused) > 5 else "")
        remarks.append(f"{len(unused)} rows of the vocabulary have no token and are left out (ids {shown})")
    return remarks
