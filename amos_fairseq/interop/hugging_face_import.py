"""A Hugging Face model becomes a pretraining model of ours: what fits its place, what starts afresh, what has no place."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.hugging_face import Weights, from_hugging_face
from amos_fairseq.interop.hugging_face_folder import Folder, encoder_settings, read_folder, read_tokenizer
from amos_fairseq.interop.hugging_face_rows import ABSENT, embedding_symbols, row_map, rows_without_token, to_our_rows
from amos_fairseq.interop.hugging_face_tables import DETECTION, FAMILIES, MASKED_LM, PRETRAINING
from amos_fairseq.interop.imported_checkpoint import NEVER_PREDICTED, Imported, build, configuration, fill
from amos_fairseq.models.configuration import SIZES
from amos_fairseq.models.pretraining import PretrainingModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GENERATOR = "generator."  # ELECTRA's second network in our model
_SHARED_BY_ELECTRA = ("embed_positions.", "embed_token_types.", "embedding_norm.")
_DETECTION_LABELS = {0: "original", 1: "replaced"}
# A generator of another number of layers, or with another eps, is none that ElectraModel builds.
_EQUAL_IN_BOTH = ("num_hidden_layers", "embedding_size", "layer_norm_eps", "max_position_embeddings", "type_vocab_size")


def import_folder(
    path: Path, arch: str | None = None, generator: Path | None = None, tokenizer: Path | None = None, seed: int = 1
) -> Imported:
    """Read a folder, and ELECTRA's generator from another, into a model of ours.

    Args:
        path: an MPNet, ELECTRA (discriminator), BERT or RoBERTa folder.
        arch: an architecture, such as amos_base; sizes come from the folder, what the folder does not say (generator,
            depths) from the architecture. Without it the one of :func:`default_arch`.
        generator: folder of an ``ElectraForMaskedLM`` with the same embeddings; for ``electra_*`` only.
        tokenizer: its folder, if it is another.
        seed: of the initial values of what the folder lacks.

    Raises:
        UserError: a file is missing, or the model cannot be held.
    """
    folder = read_folder(path)
    arch = arch or default_arch(folder)
    objective = arch.partition("_")[0]
    if generator is not None and objective != "electra":
        raise UserError(
            f"--generator has no place in --arch {arch}: its generator is a fresh one; give --arch electra_base"
        )
    found = read_tokenizer(tokenizer or path)
    ids = row_map(found)
    settings = encoder_settings(folder.family, folder.config)
    second = None if generator is None else read_generator(folder, generator)
    if second is not None:
        settings["generator_size"] = second.config.hidden_size / folder.config.hidden_size
    config = configuration(arch, settings, folder.description)
    try:
        model = build(config, found, seed)
    except UserError as error:
        raise UserError(f"{error}; what the folder does not say comes from --arch, give one of another size") from error

    head = head_to_keep(folder, objective)
    converted = from_hugging_face(folder.family, folder.weights, [head] if head else [])
    weights, leftover = converted.weights, converted.leftover
    if second is not None:
        other = from_hugging_face(second.family, second.weights, [MASKED_LM])
        check_shared(weights, other.weights, generator)
        weights = {**weights, **generator_weights(other.weights)}
        leftover = leftover + [f"{generator}: {name}" for name in other.leftover]
    remarks = vocabulary_remarks(found.dictionary_symbols, ids, len(weights["embed_tokens.weight"]))
    prefix = encoder_prefix(model)
    fresh = fill(model, placed(weights, ids, model.embed_tokens.weight, prefix))
    check_encoder_is_whole(fresh, prefix, path)
    return Imported(config, model, found, folder.description, fresh, leftover, remarks)


def encoder_prefix(model: PretrainingModel) -> str:
    """What the names of the encoder to keep begin with in the model, such as ``discriminator.``"""
    return next(name for name, part in model.named_modules() if part is model.encoder) + "."


def check_encoder_is_whole(fresh: list[str], prefix: str, path: Path) -> None:
    """:class:`UserError` where a part of the encoder to keep would start from random values."""
    missing = [name for name in fresh if name.startswith(prefix)]
    if missing:
        raise UserError(
            f"{path}: its configuration describes more than its weights hold ({missing[0].removeprefix(prefix)} is missing); "
            "take both files from the same model"
        )


def default_arch(folder: Folder) -> str:
    """The objective whose head the folder holds (ELECTRA, or MLM), else AMOS; the size whose encoder is as wide, else base."""
    width = folder.config.hidden_size
    size = next((size for size, numbers in SIZES.items() if numbers["encoder_embed_dim"] == width), "base")
    if folder.family == "electra":
        return f"electra_{size}"
    return f"mlm_{size}" if holds(folder, MASKED_LM) else f"amos_{size}"


def head_to_keep(folder: Folder, objective: str) -> str | None:
    """The head of the folder that the objective continues to train, if there is one."""
    if objective == "mlm":
        return MASKED_LM if holds(folder, MASKED_LM) else None
    if objective == "electra":
        return PRETRAINING if folder.family == "electra" and holds(folder, PRETRAINING) else None
    labels = {int(number): label for number, label in (folder.config.id2label or {}).items()}
    return DETECTION if objective == "amos" and labels == _DETECTION_LABELS and holds(folder, DETECTION) else None


def holds(folder: Folder, part: str) -> bool:
    """Whether the folder's weights have this head, or a part of it."""
    stems = {str(row.theirs).removesuffix("*") for row in FAMILIES[folder.family].heads[part]}
    return any(name.startswith(stem) for name in folder.weights for stem in stems)


def read_generator(folder: Folder, path: Path) -> Folder:
    """ELECTRA's generator; :class:`UserError` where it is none that belongs to the discriminator in ``folder``."""
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
    _check_part(path, size, here, there)
    return generator


def _check_part(path: Path, size: float, here: "PretrainedConfig", there: "PretrainedConfig") -> None:
    for name in ("intermediate_size", "num_attention_heads"):
        if round(getattr(here, name) * size) != getattr(there, name):
            raise UserError(
                f"--generator {path}: its width is {size:.3g} of the discriminator's, its {name} is not; one number "
                "describes a generator here, so this one cannot be held"
            )


def check_shared(discriminator: Weights, generator: Weights, path: Path) -> None:
    """:class:`UserError` where the two files' embeddings differ: one table is all that ours has for both."""
    names = ("embed_tokens.weight", *(f"encoder.{name}" for name in _names(discriminator, _SHARED_BY_ELECTRA)))
    differing = [name for name in names if not torch.equal(discriminator[name], generator[name])]
    if differing:
        raise UserError(
            f"--generator {path}: {', '.join(differing)} differ from the discriminator's, and an electra model here shares "
            "them; leave --generator out to import the discriminator with a fresh generator"
        )


def _names(weights: Weights, prefixes: tuple[str, ...]) -> list[str]:
    inside = (name.removeprefix("encoder.") for name in weights)
    return [name for name in inside if name.startswith(prefixes)]


def generator_weights(weights: Weights) -> Weights:
    """What only the generator has, under its names in the model."""
    own = {name: tensor for name, tensor in weights.items() if name != "embed_tokens.weight"}
    shared = tuple(f"encoder.{prefix}" for prefix in _SHARED_BY_ELECTRA)
    return {
        name.replace("encoder.", _GENERATOR, 1) if name.startswith("encoder.") else name: tensor
        for name, tensor in own.items()
        if not name.startswith(shared)
    }


def placed(weights: Weights, ids: Tensor, fresh_embedding: Tensor, prefix: str) -> Weights:
    """Names of a pretraining model whose encoder stands under ``prefix``, rows of the vocabulary in our order.

    Rows without a foreign one keep their initial values; in the output layer of an MLM head they are never predicted, so
    that its softmax is the imported one.
    """
    result: dict[str, Any] = {
        prefix + name.removeprefix("encoder.") if name.startswith("encoder.") else name: tensor
        for name, tensor in weights.items()
    }
    result["embed_tokens.weight"] = to_our_rows(weights["embed_tokens.weight"], ids, fresh_embedding.detach())
    if "mlm_head.bias" in weights:
        never = weights["mlm_head.bias"].new_full((len(fresh_embedding),), NEVER_PREDICTED)
        result["mlm_head.bias"] = to_our_rows(weights["mlm_head.bias"], ids, never)
    return result


def vocabulary_remarks(symbols: list[str], ids: Tensor, num_rows: int) -> list[str]:
    """What happened to rows that do not stand for a token on both sides."""
    remarks = []
    dictionary = embedding_symbols(symbols)
    absent = [dictionary[row] for row in (ids == ABSENT).nonzero().flatten().tolist()]
    if absent:
        remarks.append(f"the tokenizer has no {' and no '.join(absent)}: that row of the vocabulary starts afresh")
    unused = rows_without_token(num_rows, ids)
    if unused:
        shown = ", ".join(map(str, unused[:5])) + (", ..." if len(unused) > 5 else "")
        remarks.append(f"{len(unused)} rows of the vocabulary have no token and are left out (ids {shown})")
    return remarks
