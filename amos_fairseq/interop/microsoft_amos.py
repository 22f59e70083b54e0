"""The AMOS authors' released checkpoint as ours: names, and the reading of a file that fairseq 1.0.0a0 pickled.

The released file itself could not be had; this was tried on files built with its names.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_load_errors
from amos_fairseq.interop.hugging_face import Weights, num_layers, one_by_one
from amos_fairseq.interop.hugging_face_rows import embedding_symbols, to_our_rows
from amos_fairseq.interop.hugging_face_tables import Row
from amos_fairseq.interop.imported_checkpoint import NEVER_PREDICTED, Imported, build, configuration, fill
from amos_fairseq.interop.microsoft_tokenizer import MicrosoftAmosTokenizer

# Their head tells "original", ours "replaced"; their v is the matrix of a linear layer.
NEGATED, ONE_ROW = "-", "[0]"
EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
# Copies of the embedding in the file, one tensor in training.
_TIED = ("auxiliary.sentence_encoder.embed_tokens.weight", "auxiliary.lm_head.weight")
_DEFAULT_DEPTHS, _DEFAULT_MAX_DISTANCE = "4,6,8", 128  # the authors' code, fairseq/fairseq/models/amos/model.py


# fmt: off
def _encoder(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        Row(f"{ours}.embed_positions.weight",                f"{theirs}.sentence_encoder.embed_positions.weight"),
        Row(f"{ours}.embedding_norm.*",                      f"{theirs}.sentence_encoder.emb_layer_norm.*"),
        Row(f"{ours}.relative_position.table.weight",        f"{theirs}.sentence_encoder.relative_attention_bias.weight"),
        Row(f"{ours}.layers.N.attention.query_key_value.*",  f"{theirs}.sentence_encoder.layers.N.self_attn.in_proj.*"),
        Row(f"{ours}.layers.N.attention.output.*",           f"{theirs}.sentence_encoder.layers.N.self_attn.out_proj.*"),
        Row(f"{ours}.layers.N.attention_norm.*",             f"{theirs}.sentence_encoder.layers.N.self_attn_layer_norm.*"),
        Row(f"{ours}.layers.N.ffn_in.*",                     f"{theirs}.sentence_encoder.layers.N.fc1.*"),
        Row(f"{ours}.layers.N.ffn_out.*",                    f"{theirs}.sentence_encoder.layers.N.fc2.*"),
        Row(f"{ours}.layers.N.ffn_norm.*",                   f"{theirs}.sentence_encoder.layers.N.final_layer_norm.*"),
    )


DISCRIMINATOR = _encoder("discriminator", "encoder")
DETECTION = (
    Row("detection_head.output.*",                           "encoder.binary_head.out_proj.*", NEGATED),
)
GENERATOR = _encoder("generators.0", "auxiliary")
MLM_HEAD = (
    Row("mlm_heads.0.dense.*",                               "auxiliary.lm_head.dense.*"),
    Row("mlm_heads.0.norm.*",                                "auxiliary.lm_head.layer_norm.*"),
    Row("mlm_heads.0.bias",                                  "auxiliary.lm_head.bias"),
    Row("mixture.v",                                         "auxiliary.lm_head.layer_mixture.weight", ONE_ROW),
)
# fmt: on


class Inert(dict):
    """What stands in for every class of the file but tensors and plain containers: it keeps values and does nothing."""

    def __new__(cls, *arguments: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The settings and meters beside the weights, as fairseq 1.0.0a0 may have pickled them: omegaconf's containers with what
# they are made of, and numpy's numbers. None of their code runs: each name gives an Inert. argparse.Namespace, which has
# no code either, is allowed for every checkpoint (compat/checkpoints.py). Any other name is refused.
ALLOWED = (
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    "omegaconf.nodes.AnyNode",
    "omegaconf.nodes.StringNode",
    "omegaconf.nodes.IntegerNode",
    "omegaconf.nodes.FloatNode",
    "omegaconf.nodes.BooleanNode",
    "typing.Any",
    "collections.defaultdict",
    "builtins.dict",
    "builtins.list",
    "builtins.int",
    "builtins.float",
    "builtins.str",
    "builtins.bool",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)


def import_release(
    path: Path, tokenizer: Path, arch: str | None = None, depths: str | None = None, seed: int = 1
) -> Imported:
    """The released checkpoint with its tokenizer, as an ``amos`` model; sizes are read from the shapes.

    Args:
        path: the file.
        tokenizer: directory with ``sp.model`` and ``dict.txt``.
        arch: an ``amos_*``; it gives what shapes do not say (dropout, initial values).
        depths: layers of the generator that carry an MLM head; without it those that the file names, else 4,6,8.
        seed: of the initial values of what the file lacks: the generator, in a file that was stripped.

    Raises:
        UserError: the file is no such checkpoint, holds other objects, or does not belong to the tokenizer.
    """
    arch = arch or "amos_base"
    if not arch.startswith("amos"):
        raise UserError(f"--arch {arch}: the released checkpoint is an AMOS model, give amos_base")
    state = read_release(path)
    theirs = state["model"]
    found = MicrosoftAmosTokenizer.from_release(tokenizer)
    has_generator = "auxiliary.lm_head.bias" in theirs
    settings = settings_of(state, depths, has_generator)
    source = f"{path.name} (released by the AMOS authors)"
    config = configuration(arch, settings, source)
    model = build(config, found, seed)
    check_tied(theirs, path)
    weights, used = converted(theirs, has_generator, path)
    num_tokens = len(embedding_symbols(found.dictionary_symbols))
    if len(theirs[EMBEDDING]) != num_tokens:
        raise UserError(
            f"{path} has {len(theirs[EMBEDDING])} rows of vocabulary, {tokenizer} {num_tokens} tokens: give the sp.model and "
            "dict.txt that were released with it"
        )
    rows = torch.arange(num_tokens)
    weights["embed_tokens.weight"] = to_our_rows(theirs[EMBEDDING], rows, model.embed_tokens.weight.detach())
    if has_generator:
        never = torch.full((len(model.embed_tokens.weight),), NEVER_PREDICTED)
        weights["mlm_heads.0.bias"] = to_our_rows(weights["mlm_heads.0.bias"], rows, never)
    fresh = fill(model, weights)
    leftover = sorted(set(theirs) - used - {EMBEDDING, *_TIED})
    remarks = [f"MLM heads at depths {config.model.generator_depths}"] if has_generator else []
    return Imported(config, model, found, source, fresh, leftover, remarks)


def read_release(path: Path) -> dict[str, Any]:
    """The file as data, tensors in float32.

    Raises:
        UserError: it cannot be read, holds a class that is not in ``ALLOWED``, or has none of the names.
    """
    stand_ins = [(Inert, name) for name in ALLOWED]
    with explain_load_errors(str(path)), torch.serialization.safe_globals(stand_ins):
        state = torch.load(path, map_location="cpu", weights_only=True)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get(EMBEDDING), Tensor):
        raise UserError(f"{path} is not the checkpoint that the AMOS authors released: {EMBEDDING} is missing in it")
    tensors = {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return {**state, "model": floats}


def settings_of(state: dict[str, Any], depths: str | None, has_generator: bool) -> dict[str, Any]:
    """Our flags from the shapes of their weights, and what only their own settings can say."""
    weights = state["model"]
    stem = "encoder.sentence_encoder"
    try:
        table = weights[f"{stem}.relative_attention_bias.weight"]
        ffn = weights[f"{stem}.layers.0.fc1.weight"].size(0)
        positions = weights[f"{stem}.embed_positions.weight"].size(0)
    except KeyError as error:
        raise UserError(f"{error.args[0]} is missing: the checkpoint has no relative positions, or is cut") from error
    theirs = [state.get("args"), state.get("cfg")]
    if depths is None:
        said = next(settings_named(theirs, "generator_mlm_layers"), _DEFAULT_DEPTHS)
        depths = ",".join(re.findall(r"\d+", str(said)))
    generator_layers = num_layers(weights, "auxiliary.sentence_encoder.layers.")
    if has_generator and str(generator_layers) != depths.split(",")[-1]:
        raise UserError(
            f"the generator has {generator_layers} layers, its MLM heads are said to be at {depths}: give their layers with "
            "--depths, the last one is its top"
        )
    return {
        "encoder_layers": num_layers(weights, f"{stem}.layers."),
        "encoder_embed_dim": weights[EMBEDDING].size(1),
        "encoder_ffn_embed_dim": ffn,
        "encoder_attention_heads": table.size(1),
        "max_positions": positions,
        "layer_norm_eps": 1e-5,  # fairseq's LayerNorm, everywhere in their code
        "relative_position_scheme": "amos",
        "relative_position_buckets": table.size(0),
        "relative_position_max_distance": int(next(settings_named(theirs, "max_rel_pos"), _DEFAULT_MAX_DISTANCE)),
        "generator_depths": depths,
    }


def settings_named(content: Any, name: str) -> Iterator[Any]:
    """Every value that stands under ``name`` somewhere in pickled settings, whichever containers they are in."""
    if isinstance(content, argparse.Namespace):
        yield from settings_named(vars(content), name)
    elif isinstance(content, Inert):
        yield from settings_named(_inside(content), name)
    elif isinstance(content, dict):
        for key, value in content.items():
            if key == name:
                yield _inside(value) if isinstance(value, Inert) else value
            else:
                yield from settings_named(value, name)
    elif isinstance(content, (list, tuple)):
        for part in content:
            yield from settings_named(part, name)


def _inside(stand_in: Inert) -> Any:
    """What omegaconf's container or node held; its other attributes lead back to the container that it is in."""
    state = stand_in.state if isinstance(stand_in.state, dict) else {}
    return state.get("_content", state.get("_val"))


def check_tied(weights: Weights, path: Path) -> None:
    """:class:`UserError` where a copy of the token embedding is another one: ours has one for all."""
    for name in _TIED:
        if name in weights and not torch.equal(weights[name], weights[EMBEDDING]):
            raise UserError(f"{path}: {name} differs from {EMBEDDING}, which are one table here")


def converted(theirs: Weights, has_generator: bool, path: Path) -> tuple[Weights, set[str]]:
    """Their weights under our names, and which of theirs were used; :class:`UserError` where one is missing."""
    weights: Weights = {}
    used: set[str] = set()
    parts = [(DISCRIMINATOR, "encoder"), (DETECTION, "encoder")]
    parts += [(GENERATOR, "auxiliary"), (MLM_HEAD, "auxiliary")] if has_generator else []
    for rows, side in parts:
        for ours, (name,), cell in one_by_one(rows, num_layers(theirs, f"{side}.sentence_encoder.layers.")):
            if name not in theirs:
                raise UserError(f"{path}: {name} is missing: this is not the whole released checkpoint")
            tensor = theirs[name]
            weights[ours] = -tensor if cell == NEGATED else tensor[0] if cell == ONE_ROW else tensor
            used.add(name)
    return weights, used
