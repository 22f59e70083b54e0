"""Turn a Hugging Face model folder into a pretraining model of this package."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from amos_fairseq.hugging_face.convert import encoder_settings, from_hugging_face
from amos_fairseq.hugging_face.families import CONFIG_FILE, DETECTION_LABELS, PartKind
from amos_fairseq.hugging_face.read_folder import Folder, read_folder, read_folder_tokenizer
from amos_fairseq.models.configuration import MODERN, MODERN_ARCH, MODERN_SIZES, SIZES
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT, row_map
from amos_fairseq.text.tokenization.tokenizer import embedding_symbols

_GENERATOR = "generator."  # ELECTRA's second network in our model
_SHARED_BY_ELECTRA = ("embed_positions.", "embed_token_types.", "embedding_norm.")
# ElectraModel cannot build a generator in which these differ from the discriminator.
_EQUAL_IN_BOTH = ("num_hidden_layers", "embedding_size", "layer_norm_eps", "max_position_embeddings", "type_vocab_size")


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
