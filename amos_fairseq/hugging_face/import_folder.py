"""Turn a Hugging Face model folder (``config.json``, weights, tokenizer) into a checkpoint of fairseq-train.

The folder may come from a stranger. No code of it runs: JSON, safetensors, and ``pytorch_model.bin`` by a loader that accepts
only tensors.

The checkpoint is at update 0, for ``--finetune-from-model``, ``--restore-file`` with ``--reset-*``, ``load`` and ``export``.
Its settings come from fairseq-train's own parser, its model from fairseq's builder; what the folder lacks (a generator, heads)
starts from the model class's initial values.
"""

import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from amos_fairseq.checkpoint_files import check_output_file, explain_load_errors, is_hugging_face
from amos_fairseq.checkpoints.read import (
    IMPORTED_FROM,
    CheckpointPath,
    LoadedCheckpoint,
    dictionary_of,
    load_checkpoint,
)
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import best_checkpoint
from amos_fairseq.files import (
    DICTIONARY_FILE,
    TOKENIZER_DIRECTORY,
    directory_sha256,
    explain_write_errors,
    file_sha256,
    whole_file,
    whole_folder,
)
from amos_fairseq.hugging_face.config import (
    CONFIG_FILE,
    DETECTION_LABELS,
    WHOLE_FOLDER,
    check_values,
    encoder_settings,
    read_config,
    short_reason,
)
from amos_fairseq.hugging_face.weights import (
    DEBERTA_V2,
    FAMILIES,
    NEVER_PREDICTED,
    Head,
    Weights,
    count_layers,
    from_hugging_face,
)
from amos_fairseq.models.configuration import DEBERTA, DEBERTA_SIZES, MODERN, MODERN_ARCH, MODERN_SIZES, SIZES
from amos_fairseq.models.pretraining import DELTA, POOLER, PretrainingModel
from amos_fairseq.setting_checks import as_flags
from amos_fairseq.text.tokenization.conversion import from_sentencepiece
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, FastTokenizer, row_map
from amos_fairseq.text.tokenization.tokenizer import Tokenizer, embedding_symbols
from amos_fairseq.untrusted import LAST_KEYS, field, plain_name, read_bytes, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS_FILE, PICKLED_WEIGHTS_FILE = "model.safetensors", "pytorch_model.bin"
# DeBERTaV3's authors put the generator beside the discriminator, and SentencePiece's model of the tokenizer.
GENERATOR_FILE, GENERATOR_CONFIG_FILE = "pytorch_model.generator.bin", "generator_config.json"
SPM_FILE, DELTA_OF_AUTHORS = "spm.model", "deberta.embeddings.word_embeddings._weight"
LARGEST_LAG = 2.0**-7  # of the largest value: half precision, and one update of Delta
# Lines whose pieces must be those of SentencePiece.
_COMPARED = ["The quick brown fox doesn't jump over 1,234.5 lazy dogs (yet).", "Café, naïve façade: “quoted” ½ ﬁne."]
# Tensors of a file may share values, as tied layers do; more of them than this in one file would exhaust the memory.
MOST_SHARED = 8
# AutoTokenizer can build a tokenizer.json from one of these.
_SLOW_TOKENIZER_FILES = ("vocab.txt", "vocab.json", "tokenizer_config.json")
_OF_ENCODER = ("embed_tokens.", "encoder.")
# What ELECTRA's generator shares with its discriminator, in our names.
_SHARED_BY_ELECTRA = ("embed_tokens.", "encoder.embed_", "encoder.embedding_norm.")
# Our ELECTRA's generator has these settings of its discriminator, and these sizes by --generator-size.
_EQUAL_IN_BOTH = ("encoder_layers", "layer_norm_eps", "max_positions", "token_types")
_SCALED_IN_GENERATOR = ("encoder_ffn_embed_dim", "encoder_attention_heads")
_SAME_MODEL = "take both files from the same model"
_MODULES = "modules.json"  # of sentence-transformers
_TENSORFLOW = "has weights of TensorFlow alone: take model.safetensors, or convert them (transformers 4, from_tf=True)"
# What a folder without configuration or weights is, by a file in it; {} is the newest folder with such a file.
_OTHER_FOLDERS = {
    "adapter_config.json": "is an adapter (LoRA): merge it into its model first (merge_and_unload of PEFT), and save that",
    "tf_model.h5": _TENSORFLOW,
    "*.ckpt.index": _TENSORFLOW,
    "checkpoint-*/config.json": "is the output of a Trainer: give its newest model, {}",
    "snapshots/*/config.json": "is a model in the cache of the hub: give its newest revision, {}",
}
_POINTER = b"version https://git-lfs"
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")  # of DataParallel, and of torch.compile
# Python that saves a file of weights again under other names.
_RENAMED = {
    ".bin": "import torch; w = torch.load(f, 'cpu', weights_only=True); torch.save({}, f)",
    ".safetensors": "from safetensors.torch import *; w = load(open(f, 'rb').read()); save_file({}, f, dict(format='pt'))",
}
_ENCODER = re.compile(r"sentence_transformers(?:\.\w+)*\.Transformer ((?:\d+_\w+)?)", re.ASCII)
_POOLING = re.compile(r"sentence_transformers(?:\.\w+)*\.Pooling (\d+_\w+)", re.ASCII)
_MODE = "pooling_mode_"  # of earlier versions, which have a setting for each


@dataclass(frozen=True)
class Imported:
    config: DictConfig  # complete, as fairseq-train would have saved it
    model: BaseFairseqModel
    tokenizer: Tokenizer
    source: str  # where the weights come from
    newly_initialized: list[str]  # parameters that got no foreign weight
    unexpected_keys: list[str]  # foreign weights that the model has no parameter for
    remarks: list[str]  # what else a user must know

    @property
    def new_modules(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in self.newly_initialized})


@dataclass(frozen=True)
class Folder:
    """Configuration and weights of a folder; ``weights`` are float32, under the names of the file."""

    family: str
    config: "PretrainedConfig"
    weights: Weights

    def has_head(self, head: Head) -> bool:
        """Return whether the weights include this head, or some of its weights."""
        heads = FAMILIES[self.family].heads
        # The dense layer and LayerNorm with which every head of ModernBERT begins.
        in_all = set.intersection(*(set(names.values()) for names in heads.values()))
        lines = (line if isinstance(line, str) else line[0] for line in heads[head].values() if line not in in_all)
        prefixes = tuple(theirs.removesuffix("*") for theirs in lines)
        return any(name.startswith(prefixes) for name in self.weights)


def import_folder(
    path: Path, arch: str | None = None, generator: Path | None = None, tokenizer: Path | None = None
) -> Imported:
    """Convert a folder, and ELECTRA's generator from a second folder, to a model of this package.

    Args:
        path: an MPNet, ELECTRA (discriminator), BERT, DistilBERT, RoBERTa, XLM-R, ModernBERT or DeBERTaV3 folder.
        arch: for the default see ``default_arch``. Sizes come from the folder, what it lacks (generator, depths) from here.
        generator: folder of an ``ElectraForMaskedLM`` with the same embeddings; for ``electra_*`` only.
        tokenizer: folder of the tokenizer, if it is another.
    """
    name = path.absolute().name or path.resolve().name
    pooling, (path, remarks) = folder_pooling(path), find_encoder(path)
    folder = read_folder(path)
    arch = arch or default_arch(folder)
    objective = arch.partition("_")[0]
    if generator is not None and objective != "electra":
        refuse_generator(generator, f"--arch {arch} is not an electra_*")
    folder_tokenizer = read_folder_tokenizer(tokenizer or path, folder.config.vocab_size)
    ids = row_map(folder_tokenizer)
    settings = encoder_settings(folder.family, folder.config) | ({"pooling": pooling} if pooling else {})
    head = head_to_import(folder, objective)
    weights, unexpected_keys = from_hugging_face(folder.family, folder.weights, [head] if head else [])
    generator_weights: Weights = {}
    is_pair = objective == "electra" and folder.family == DEBERTA_V2
    if is_pair:
        of_pair, generator_weights, used = read_pair(folder, path, generator, weights)
        settings |= of_pair
        unexpected_keys = [name for name in unexpected_keys if name not in used]
        if not generator_weights:
            remarks.append(
                f"no {GENERATOR_FILE}: the generator is new, and amos adapt trains it first (--generator new)"
            )
    elif generator is not None:
        settings["generator_size"], generator_weights, left_out = read_generator(folder, generator, weights)
        unexpected_keys += [f"{generator}: {name}" for name in left_out]
    num_parameters = sum(tensor.numel() for key, tensor in weights.items() if key.startswith(_OF_ENCODER))
    source = f"{name} ({folder.family}, {num_parameters / 1e6:.3g}M)"
    config = configuration(arch, settings, source)
    check_sizes(path, settings, weights)
    try:
        model = build_model(config, folder_tokenizer)
    except UserError as error:
        raise UserError(f"{path / CONFIG_FILE}, with --arch {arch} for what it lacks: {error}") from error
    prefix = next(name for name, module in model.named_modules() if module is model.encoder) + "."  # "discriminator."
    networks = in_network(weights, prefix) | in_network(generator_weights, "generator.")
    newly_initialized = fill(model, networks, ids)
    missing = [name for name in newly_initialized if name.startswith(prefix)]
    if missing:  # would start from random values
        raise UserError(f"{path} lacks weights of its configuration ({missing[0].removeprefix(prefix)}): {_SAME_MODEL}")
    remarks += vocabulary_remarks(folder_tokenizer.dictionary_symbols, ids, len(weights["embed_tokens.weight"]))
    if weights.keys() & POOLER.keys():
        start = "a classification head of --pooling first" if pooling else "a classification head"
        remarks.append(f"the pooler is kept: {start} starts from it, and amos export writes it again")
    if pooling:
        remarks.append("its states are pooled by their mean: amos classify does so, too (--pooling mean)")
    return Imported(config, model, folder_tokenizer, source, newly_initialized, unexpected_keys, remarks)


def find_encoder(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of the encoder in a folder of sentence-transformers, and a remark; ``path`` itself elsewhere."""
    modules = read_json(path / _MODULES, WHOLE_FOLDER, list, optional=True, **LAST_KEYS)
    if modules is None:
        refuse_other_folder(path)
        return path, []
    first = modules[0] if modules and isinstance(modules[0], dict) else {}
    described = f"{first.get('type')} {first.get('path')}"
    match = _ENCODER.fullmatch(described)
    if match is None:
        raise UserError(f"{path / _MODULES} does not begin with a text encoder ({described[:100]!a}): {WHOLE_FOLDER}")
    return path / match[1], ["sentence-transformers: what follows the encoder is not kept, but for the mean as pooling"]


def folder_pooling(path: Path) -> str:
    """Return "mean" for a folder of sentence-transformers that pools states by their mean alone, else ""."""
    modules = read_json(path / _MODULES, WHOLE_FOLDER, list, optional=True, **LAST_KEYS) or []
    described = [f"{module.get('type')} {module.get('path')}" for module in modules if isinstance(module, dict)]
    folders = [match[1] for each in described if (match := _POOLING.fullmatch(each))]
    config = read_json(path / folders[0] / CONFIG_FILE, WHOLE_FOLDER, optional=True, **LAST_KEYS) if folders else None
    config = config or {}
    modes = config.get("pooling_mode", [name for name, on in config.items() if name.startswith(_MODE) and on is True])
    return "mean" if modes in ("mean", ["mean"], [f"{_MODE}mean_tokens"]) else ""


def refuse_other_folder(path: Path) -> None:
    """Refuse a folder of Hugging Face's tools that is no model, and say what it is."""
    files = (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE) if (path / CONFIG_FILE).is_file() else ()
    if any(any(path.glob(f"{name}*")) for name in files):
        return
    for pattern, problem in _OTHER_FOLDERS.items():
        if found := [file.parent for file in path.glob(pattern)]:
            number = [list(map(int, re.findall(r"^checkpoint-(\d+)$", folder.name))) for folder in found]
            newest = max(zip(number, (folder.stat().st_mtime for folder in found), found, strict=True))[-1]
            raise UserError(f"{path} {problem.format(newest)}")


def default_arch(folder: Folder) -> str:
    """Return the objective of the folder's head (ELECTRA, or MLM), else AMOS, in the size with this width, else base."""
    others = {"modernbert": (f"{MODERN_ARCH}_", MODERN_SIZES), DEBERTA_V2: (f"{DEBERTA}_", DEBERTA_SIZES)}
    prefix, sizes = others.get(folder.family, ("", SIZES))
    width = folder.config.hidden_size
    size = next((size for size, settings in sizes.items() if settings["encoder_embed_dim"] == width), "base")
    if folder.family == "electra" or (folder.family == DEBERTA_V2 and folder.has_head(Head.PRETRAINING)):
        return f"electra_{prefix}{size}"
    if folder.family == DEBERTA_V2:  # whose masked language model in transformers has no mask decoder
        return f"amos_{prefix}{size}"
    return f"mlm_{prefix}{size}" if folder.has_head(Head.MASKED_LM) else f"amos_{prefix}{size}"


def head_to_import(folder: Folder, objective: str) -> Head | None:
    """Return the head of the folder that the objective continues to train, if there is one."""
    head = None
    if objective == "mlm":
        head = None if folder.family == DEBERTA_V2 else Head.MASKED_LM
    elif objective == "electra" and folder.family in ("electra", DEBERTA_V2):
        head = Head.PRETRAINING
    elif objective == "amos" or (objective == "electra" and folder.family == "modernbert"):
        labels = {int(number): label for number, label in (folder.config.id2label or {}).items()}
        head = Head.DETECTION if labels == dict(enumerate(DETECTION_LABELS)) else None
    return head if head is not None and folder.has_head(head) else None


def check_sizes(path: Path, settings: dict[str, Any], weights: Weights) -> None:
    """Refuse a configuration that gives other sizes than the weights, before a model has these sizes."""

    def compare(what: str, here: Any, in_configuration: Any) -> None:
        if here != in_configuration:
            problem = f"{what} is {here}, the configuration says {in_configuration}"
            raise UserError(f"{path}: the weights do not fit their configuration: {problem}; {_SAME_MODEL}")

    compare("the number of layers", count_layers(weights, "encoder.layers."), settings["encoder_layers"])
    width, is_modern, first = settings["encoder_embed_dim"], settings.get("encoder") == MODERN, "encoder.layers.0."
    embedding_width = settings["embedding_dim"] or width
    expected = {
        "embed_tokens.weight": [len(weights["embed_tokens.weight"]), embedding_width],
        "encoder.embed_positions.weight": [settings["max_positions"], embedding_width],
        "encoder.embed_token_types.weight": [settings["token_types"], embedding_width],
        "encoder.decoder_positions.weight": [settings["max_positions"], width],
        "encoder.relative_table.weight": [settings.get("relative_position_buckets"), width],
        f"{first}attention.query_key_value.weight": [3 * width, width],
        f"{first}ffn_in.weight": [settings["encoder_ffn_embed_dim"] * (2 if is_modern else 1), width],
    }
    for key, tensor in weights.items():
        same = re.sub(r"^encoder\.layers\.\d+\.", first, key)  # all layers are as large as the first
        compare(key, list(tensor.shape), expected.setdefault(same, list(tensor.shape)))


def read_generator(folder: Folder, path: Path, discriminator: Weights) -> tuple[float, Weights, list[str]]:
    """Return the relative size of ELECTRA's generator, the weights that it alone has, and names that have no counterpart."""
    generator = read_folder(find_encoder(path)[0])
    if generator.family != "electra" or folder.family != "electra":
        refuse_generator(path, "only two ELECTRA models share their embeddings")
    here, there = (encoder_settings("electra", each.config) for each in (folder, generator))
    size = there["encoder_embed_dim"] / here["encoder_embed_dim"]
    for name in _EQUAL_IN_BOTH + _SCALED_IN_GENERATOR:
        expected = round(here[name] * size) if name in _SCALED_IN_GENERATOR else here[name]
        if there[name] != expected:
            refuse_generator(path, f"{name} is {there[name]}, and must be {expected} at {size:.3g} of the width")
    weights, unexpected_keys = from_hugging_face("electra", generator.weights, [Head.MASKED_LM])
    check_sizes(path, there, weights)
    shared = [name for name in discriminator if name.startswith(_SHARED_BY_ELECTRA)]
    if differing := [name for name in shared if not torch.equal(discriminator[name], weights[name])]:
        refuse_generator(path, f"{', '.join(differing)} differ")
    return size, {name: tensor for name, tensor in weights.items() if name not in shared}, unexpected_keys


def read_pair(
    folder: Folder, path: Path, generator: Path | None, discriminator: Weights
) -> tuple[dict[str, Any], Weights, list[str]]:
    """Return settings of DeBERTaV3's pair, the weights that its generator alone has, and names of the folder that were used.

    Without a generator these are the settings of a new one. With it, ``discriminator`` gets the generator's table of tokens E
    and the difference Delta to its own, which the folder has as ``_weight``, or which is computed. In a folder with both, the
    whole table may be older by one update than Delta.
    """
    here = encoder_settings(DEBERTA_V2, folder.config)
    settings = {"generator_size": 1.0, "disentangled_embeddings": True}
    settings["generator_layers"] = max(2, here["encoder_layers"] // 2)
    if generator is None and not (path / GENERATOR_FILE).is_file():
        return settings, {}, []
    source = generator or path
    other = read_folder(source, (source / GENERATOR_FILE).is_file())
    if other.family != DEBERTA_V2:
        refuse_generator(source, "it is no DeBERTaV3")
    there = encoder_settings(DEBERTA_V2, other.config)
    if differing := [name for name in here if here[name] != there[name] and name != "encoder_layers"]:
        refuse_generator(source, f"{differing[0]} is {there[differing[0]]}, and must be {here[differing[0]]}")
    weights, _ = from_hugging_face(DEBERTA_V2, other.weights, [Head.MASKED_LM])
    check_sizes(source, there, weights)
    shared, whole = weights.pop("embed_tokens.weight"), discriminator["embed_tokens.weight"]
    delta = folder.weights.get(DELTA_OF_AUTHORS)
    if shared.shape != whole.shape or (delta is not None and delta.shape != whole.shape):
        refuse_generator(source, "its table of tokens has another size")
    if delta is None:
        delta = whole - shared
    elif not (shared + delta - whole).abs().max() <= LARGEST_LAG * whole.abs().max():
        refuse_generator(source, "its table of tokens and _weight do not add up to the discriminator's table")
    discriminator |= {"embed_tokens.weight": shared, DELTA: delta}
    return settings | {"generator_layers": there["encoder_layers"]}, weights, [DELTA_OF_AUTHORS]


def refuse_generator(path: Path, reason: str) -> NoReturn:
    raise UserError(
        f"the generator in {path} was not trained with this discriminator ({reason}): give the one that was, or none"
    )


def in_network(weights: Weights, prefix: str) -> Weights:
    """Return the weights with ``prefix`` in the names of the encoder, where one of our models has several networks."""
    return {re.sub(r"^encoder\.", prefix, name): tensor for name, tensor in weights.items()}


def vocabulary_remarks(symbols: list[str], ids: Tensor, num_rows: int) -> list[str]:
    """Describe the vocabulary rows that have no token in the folder or in our dictionary."""
    dictionary = embedding_symbols(symbols)
    absent = [dictionary[row] for row in (ids == ABSENT).nonzero().flatten().tolist()]
    unused = num_rows - len(set(ids.tolist()) - {ABSENT})  # of a vocabulary that was rounded up
    remarks = []
    if absent:
        remarks.append(
            f"the tokenizer has no {' and no '.join(absent)}: that row of the vocabulary is newly initialized"
        )
    if unused > 0:
        remarks.append(f"{unused} rows of the vocabulary have no token and are left out")
    return remarks


def read_folder(path: Path, is_generator: bool = False) -> Folder:
    """Return the model of a folder, or the generator that DeBERTaV3's authors put beside it."""
    family, config = read_config(path / (GENERATOR_CONFIG_FILE if is_generator else CONFIG_FILE))
    file = path / GENERATOR_FILE if is_generator else weights_file(path)
    return Folder(family, config, _read_shards(file) if file.suffix == ".json" else _read_weights(file))


def weights_file(path: Path) -> Path:
    """Return the file of the weights in a folder, or the index of several."""
    for name in (WEIGHTS_FILE, PICKLED_WEIGHTS_FILE):
        for file in (path / name, path / f"{name}.index.json"):
            if file.is_file():
                return file
    raise UserError(
        f"{path} holds neither {WEIGHTS_FILE} nor {PICKLED_WEIGHTS_FILE}, nor an index: give the whole folder"
    )


def _read_shards(index: Path) -> Weights:
    """Return the weights of all files that an index names: ``{"weight_map": {name of a weight: name of a file}}``."""
    weights: Weights = {}
    try:
        file_of = field(read_json(index, WHOLE_FOLDER, **LAST_KEYS), "weight_map", dict)
        shards = {Path(plain_name(file)).name for file in file_of.values()}  # files of this folder alone
    except ValueError as error:
        raise UserError(f"{index} is not an index of weights ({error}): {WHOLE_FOLDER}") from error
    for shard in sorted(shards):
        if os.path.isfile(index.parent / shard):  # False also for a name that no file can have
            weights |= _read_weights(index.parent / shard)
    return weights


def _read_weights(file: Path) -> Weights:
    """Return names and plain tensors, in float32, that are not larger than their file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights, advice = None, "download it, or save it again as safetensors"
    if file.stat().st_size < 1024 and read_bytes(file, advice).startswith(_POINTER):
        fault, advice = "it is a pointer of git-lfs", "run `git lfs pull` in its folder"
    elif file.suffix == ".safetensors":
        try:
            weights = load_file(file)
        except (SafetensorError, OSError, MemoryError) as error:  # the whole file is mapped
            fault = str(error)
    else:
        with explain_load_errors(str(file)):
            weights = torch.load(file, map_location="cpu", weights_only=True)
    if weights is not None:
        fault = _fault_of(weights, file.stat().st_size)
        prefixes = {_WRAPPERS.match(name)[0] for name in weights} if not fault else {""}
        if len(prefixes) == 1 and (prefix := prefixes.pop()):
            fault = f"all names begin with {prefix}, of DataParallel or torch.compile"
            code = _RENAMED[file.suffix].format(f"{{n.removeprefix('{prefix}'): w[n] for n in w}}")
            advice = f'remove that: python -c "import sys; f = sys.argv[1]; {code}" {shlex.quote(str(file))}'
    if fault:
        raise UserError(f"{file} is not the whole state of a model ({fault}): {advice}")
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}


def _fault_of(weights: Any, size: int) -> str:
    """Return why the content of a file of ``size`` bytes is not the weights of a model; empty if it is."""
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        return "names and tensors are expected"
    for key, tensor in weights.items():
        try:
            plain_name(key)
        except ValueError as error:
            return f"the name of a weight: {error}"
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
            return f"the weight {key} has no plain numbers but {tensor.dtype}, {tensor.layout}, {tensor.device}"
    # A view can repeat a single value any number of times.
    is_larger = sum(tensor.nbytes for tensor in weights.values()) > MOST_SHARED * size
    return "it has tensors of more values than it stores" if is_larger else ""


def read_folder_tokenizer(path: Path, num_rows: int = 1) -> FastTokenizer:
    """Return the tokenizer of the folder; ``transformers`` converts one without ``tokenizer.json``.

    Not DeBERTaV3's ``spm.model``, in which versions 4 and 5 see different pieces; ``num_rows`` are those of the model's table.
    """
    if os.path.lexists(path / FastTokenizer.model_file):
        return FastTokenizer.from_files(path, {})
    if os.path.isfile(path / SPM_FILE):
        return from_sentencepiece(path / SPM_FILE, read_bytes(path / SPM_FILE, WHOLE_FOLDER), _COMPARED, num_rows)
    # Opening a pipe would wait for its writer.
    are_files = path.is_dir() and all(file.is_dir() or os.path.isfile(file) for file in path.iterdir())
    settings = read_json(path / "tokenizer_config.json", WHOLE_FOLDER, optional=True, **LAST_KEYS) or {}
    is_code = "auto_map" in settings or any(path.glob("tokeniz*.py"))  # AutoTokenizer would take another class instead
    if is_code or not are_files or not any((path / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        problem = "only a tokenizer that is code, which is not run" if is_code else "nor files to build it from"
        raise UserError(f"{path} holds no tokenizer.json, {problem}: give --tokenizer DIR with it")
    if os.path.lexists(path / CONFIG_FILE):  # AutoTokenizer reads it too
        check_values(path / CONFIG_FILE, read_json(path / CONFIG_FILE, WHOLE_FOLDER, **LAST_KEYS))
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as converted:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_fast=True
            )
            tokenizer.backend_tokenizer.to_str()  # of a class that cannot be converted, this attribute is missing
            tokenizer.save_pretrained(converted)
        except Exception as error:  # each of its classes reads files in its own way, and raises what its code meets
            problem = f"its tokenizer cannot be read ({short_reason(error)})"
            raise UserError(f"{path}: {problem}: give --tokenizer DIR with tokenizer.json") from error
        return FastTokenizer.from_files(Path(converted), {})


def configuration(arch: str, settings: dict[str, Any], source: str) -> DictConfig:
    """Return the configuration that ``fairseq-train --arch ARCH`` saves with these settings of the model as flags."""
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), PretrainingModel):
        known = (name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, PretrainingModel))
        raise UserError(f"--arch {arch} is not an architecture of this package: give one of {', '.join(sorted(known))}")
    fixed = ["--task", "text_pretraining", "--optimizer", "grouped_adam", "--lr", "0"]
    fixed += ["--arch", arch, "--criterion", arch.partition("_")[0]]
    if arch in ("electra_large", "electric_large"):
        fixed += ["--mask-prob", "0.25"]  # ELECTRA, Table 6; amos score needs the share
    parser = options.get_training_parser()
    flags = options.parse_args_and_arch(parser, ["imported", *fixed, *as_flags(settings)])
    config = convert_namespace_to_omegaconf(flags)
    with open_dict(config):
        config.task.data = IMPORTED_FROM + source
    return config


def build_model(config: DictConfig, tokenizer: Tokenizer) -> BaseFairseqModel:
    """Build the pretraining model of ``config`` with the same initial values each time."""
    # A task that masks blocks gets the whole model, with its generator.
    task = SimpleNamespace(source_dictionary=dictionary_of(tokenizer), masked_share=config.task.mask_prob)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return models.build_model(config.model, task)


@torch.no_grad()
def fill(model: BaseFairseqModel, weights: Weights, ids: Tensor) -> list[str]:
    """Copy ``weights`` (names of the model) into the model; return the names of the parameters that got none.

    The rows of the vocabulary are put in our order. A token without a foreign row keeps its initial embedding, and an MLM head
    never predicts it, so that the softmax over the other tokens is the imported one.

    Args:
        ids: [dictionary size] int64, the foreign id of each of our rows, -1 where there is none.
    """
    model.make_room(weights)
    state = model.state_dict()
    known = (ids != ABSENT).nonzero().squeeze(1)
    for name, theirs in weights.items():
        has_rows_of_vocabulary = re.fullmatch(r"embed_tokens\.weight|disentangled\S+|mlm_heads?(\.\d+)?\.bias", name)
        compared = slice(1 if has_rows_of_vocabulary else 0, None)  # the number of rows may differ
        if name not in state or state[name].shape[compared] != theirs.shape[compared]:
            expected = list(state[name].shape) if name in state else "nothing"
            fault = f"{name} is {list(theirs.shape)}, in the configuration {expected}"
        elif has_rows_of_vocabulary and int(ids.max()) >= len(theirs):
            fault = f"{len(theirs)} rows of vocabulary, and the tokenizer has the id {int(ids.max())}"
        else:
            fault = ""
        if fault:
            raise UserError(f"these weights do not belong to their configuration or tokenizer: {fault}")
        if not has_rows_of_vocabulary:
            state[name].copy_(theirs)
            continue
        if theirs.dim() == 1:
            state[name].fill_(NEVER_PREDICTED)
        state[name][known] = theirs[ids[known]].to(state[name].dtype)
    filled = {state[name].data_ptr() for name in weights}  # ELECTRA's two networks share some under two names
    return sorted(name for name, tensor in state.items() if tensor.data_ptr() not in filled)


def write(imported: Imported, out: Path) -> None:
    """Write ``tokenizer/`` and beside it ``out``, each completely or not at all."""
    check_output_file(out)
    directory = out.parent / TOKENIZER_DIRECTORY
    with explain_write_errors(out, "make room, or give another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not directory.exists():
            with whole_folder(directory) as unfinished_folder:
                imported.tokenizer.save(unfinished_folder)
        elif directory_sha256(directory) != imported.tokenizer.sha256:
            raise UserError(f"{directory} is the tokenizer of another model: give {out.name} a directory of its own")
        # An open file instead of its name: only then torch reports why it could not write.
        with whole_file(str(out)) as unfinished, open(unfinished, "wb") as file:
            torch.save(checkpoint_state(imported, directory), file)


def checkpoint_state(imported: Imported, tokenizer_directory: Path) -> dict[str, Any]:
    """Return the state that fairseq-train would save before its first update."""
    config = imported.config
    optimizer = {"criterion_name": config.criterion._name, "optimizer_name": config.optimizer._name}
    optimizer |= {"lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": imported.model.state_dict(),
        "criterion": None,
        "optimizer_history": [optimizer],
        "task_state": {
            "tokenizer_sha256": directory_sha256(tokenizer_directory),
            "dictionary_sha256": file_sha256(tokenizer_directory / DICTIONARY_FILE),
        },
        "extra_state": {
            "metrics": {},
            "previous_training_time": 0,
            "newly_initialized": imported.new_modules,
            # Version 2 at the beginning of an epoch: fairseq then resets its meters.
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
        },
        "last_optimizer_state": None,
    }


def import_into(path: Path, folder: Path) -> tuple[Path, list[str]]:
    """Import the folder ``path`` to fine-tune it: return its checkpoint in a new ``folder``, and lines about it.

    The same weights give a file of the same bytes, and the same versions of the libraries.
    """
    imported = import_folder(path)
    with explain_write_errors(folder, "make room, or give another place"), whole_folder(folder, replace=True) as whole:
        write(imported, whole / "model.pt")
    absent = ", ".join(name.replace("_", " ") for name in imported.new_modules)
    lines = [f"{imported.source} is imported" + f"; not in it, and only for pretraining: {absent}" * bool(absent)]
    lines += [*imported.remarks, f"left out: {', '.join(imported.unexpected_keys)}"]
    return folder / "model.pt", lines if imported.unexpected_keys else lines[:-1]


def load_model(path: CheckpointPath, tokenizer: CheckpointPath | None = None) -> LoadedCheckpoint:
    """Read a checkpoint as ``load_checkpoint`` does, also that of the best run of an OUT; or import a folder, whose
    ``file`` is the one of its weights."""
    folder = Path(path)
    if not is_hugging_face(folder):
        return load_checkpoint(best_checkpoint(folder), tokenizer)
    imported = import_folder(folder, tokenizer=Path(tokenizer) if tokenizer else None)
    cfg = OmegaConf.to_container(imported.config, resolve=True, enum_to_str=True)
    text = dictionary_of(imported.tokenizer), imported.tokenizer
    settings = cfg["task"], 0, cfg["criterion"], "", frozenset(imported.new_modules)
    return LoadedCheckpoint(weights_file(find_encoder(folder)[0]), imported.model.eval(), *text, *settings)


def report_lines(imported: Imported, out: Path) -> list[str]:
    """Return lines about what is imported, initialized or left out, and the flags that build the same model."""
    model = imported.config.model
    sizes = {name: parameter.numel() for name, parameter in imported.model.named_parameters()}
    initialized = [name for name in imported.newly_initialized if name in sizes]
    total = sum(sizes.values())
    num_imported = total - sum(sizes[name] for name in initialized)
    lines = [f"{imported.source}: {num_imported:,} of {total:,} parameters of {model._name} are imported"]
    if initialized:
        modules = ", ".join(sorted({name.split(".")[0] for name in initialized}))
        lines.append(f"initialized randomly: {modules} ({len(initialized)} weights)")
    lines += imported.remarks
    if imported.unexpected_keys:
        lines.append(f"left out, no counterpart in this model: {', '.join(imported.unexpected_keys)}")
    lines.append(f"wrote {out} and {out.parent / TOKENIZER_DIRECTORY}")
    # fairseq-train needs the flags that differ from the architecture's.
    defaults = configuration(model._name, {}, "").model
    changed = as_flags({name: value for name, value in model.items() if value != defaults[name]})
    lines.append(f"flags of fairseq-train that build this model: --arch {' '.join([model._name, *changed])}")
    return lines
