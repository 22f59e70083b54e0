"""Import of the checkpoint that the AMOS authors released, a pickle of fairseq 1.0.0a0.

The released file itself could not be obtained; this was tried on files built with its weight names.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amos_fairseq.checkpoint_files import explain_load_errors
from amos_fairseq.errors import UserError
from amos_fairseq.functional.relative_position import amos_bucket
from amos_fairseq.hugging_face.import_folder import Imported, build_model, configuration, fill
from amos_fairseq.hugging_face.weights import Conversion, Names, Weights, count_layers, to_our_names
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.tokenizer import embedding_symbols

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
_POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
_BIAS_TABLE = "encoder.sentence_encoder.relative_attention_bias.weight"
_FIRST_FFN = "encoder.sentence_encoder.layers.0.fc1.weight"
# Copies of the embedding in the file; a single tensor in training.
_TIED = ("auxiliary.sentence_encoder.embed_tokens.weight", "auxiliary.lm_head.weight")
_DEFAULT_DEPTHS, _MAX_DISTANCE = "4,6,8", 128  # the authors' code, fairseq/fairseq/models/amos/model.py


def _encoder(ours: str, theirs: str) -> Names:
    return {
        f"{ours}.embed_positions.weight": f"{theirs}.embed_positions.weight",
        f"{ours}.embedding_norm.*": f"{theirs}.emb_layer_norm.*",
        f"{ours}.relative_position.table.weight": f"{theirs}.relative_attention_bias.weight",
        f"{ours}.layers.N.attention.query_key_value.*": f"{theirs}.layers.N.self_attn.in_proj.*",
        f"{ours}.layers.N.attention.output.*": f"{theirs}.layers.N.self_attn.out_proj.*",
        f"{ours}.layers.N.attention_norm.*": f"{theirs}.layers.N.self_attn_layer_norm.*",
        f"{ours}.layers.N.ffn_in.*": f"{theirs}.layers.N.fc1.*",
        f"{ours}.layers.N.ffn_out.*": f"{theirs}.layers.N.fc2.*",
        f"{ours}.layers.N.ffn_norm.*": f"{theirs}.layers.N.final_layer_norm.*",
    }


DISCRIMINATOR = {
    "embed_tokens.weight": EMBEDDING,
    **_encoder("discriminator", "encoder.sentence_encoder"),
    # Theirs is positive for "original", ours for "replaced".
    "detection_head.output.*": ("encoder.binary_head.out_proj.*", Conversion(torch.neg)),
}
GENERATOR = {
    **_encoder("generators.0", "auxiliary.sentence_encoder"),
    "mlm_heads.0.dense.*": "auxiliary.lm_head.dense.*",
    "mlm_heads.0.norm.*": "auxiliary.lm_head.layer_norm.*",
    "mlm_heads.0.bias": "auxiliary.lm_head.bias",
    "mixture.v": ("auxiliary.lm_head.layer_mixture.weight", Conversion(torch.squeeze)),
}


class Inert(dict):
    """Replaces every class of the file except tensors and plain containers: it runs no code."""

    def __new__(cls, *arguments: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


# Settings and meters beside the weights, as fairseq 1.0.0a0 may have pickled them: omegaconf's containers with their parts,
# and numpy's scalars. None of their code runs: each name is loaded as an Inert. argparse.Namespace, which has no code either,
# is allowed for every checkpoint (compat/checkpoints.py). Any other name is refused.
ALLOWED = (
    "omegaconf.dictconfig.DictConfig",
    "omegaconf.listconfig.ListConfig",
    "omegaconf.base.ContainerMetadata",
    "omegaconf.base.Metadata",
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean")),
    "typing.Any",
    "collections.defaultdict",
    *(f"builtins.{kind}" for kind in ("dict", "list", "int", "float", "str", "bool")),
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)


def import_release(path: Path, tokenizer: Path, arch: str | None = None, depths: str | None = None) -> Imported:
    """Convert the released checkpoint and its tokenizer to an ``amos`` model; sizes come from the shapes of its weights.

    Args:
        tokenizer: directory with ``sp.model`` and ``dict.txt``.
        arch: an ``amos_*``; it determines what shapes do not (dropout, initial values).
        depths: layers of the generator that have an MLM head; the default is 4,6,8.
    """
    theirs = read_release(path)
    release_tokenizer = MicrosoftAmosTokenizer.from_release(tokenizer)
    num_tokens = len(embedding_symbols(release_tokenizer.dictionary_symbols))
    num_layers, num_generator_layers = (
        count_layers(theirs, f"{side}.sentence_encoder.layers.") for side in ("encoder", "auxiliary")
    )
    depths, has_generator = depths or _DEFAULT_DEPTHS, "auxiliary.lm_head.bias" in theirs
    settings = settings_of_shapes(theirs) | {"encoder_layers": num_layers, "generator_depths": depths}
    tied = [theirs[name] for name in _TIED if name in theirs]
    fault = (
        "" if all(torch.equal(copy, theirs[EMBEDDING]) for copy in tied) else f"a copy of {EMBEDDING} differs from it"
    )
    if len(theirs[EMBEDDING]) != num_tokens:
        fault = f"it has {len(theirs[EMBEDDING])} rows of vocabulary, {tokenizer} {num_tokens} tokens"
    if has_generator and str(num_generator_layers) != depths.split(",")[-1]:
        fault = f"the generator has {num_generator_layers} layers, its MLM heads are said to be at {depths} (--depths)"
    if fault:
        raise UserError(f"{path}: {fault}: give the checkpoint, sp.model and dict.txt of the release")
    whose = f"the released checkpoint, such as {path} should be"
    weights, used = to_our_names(DISCRIMINATOR, num_layers, theirs, whose)
    if has_generator:
        generator_weights, used_there = to_our_names(GENERATOR, num_generator_layers, theirs, whose)
        weights, used = weights | generator_weights, used | used_there
    source = f"{path.name} (released by the AMOS authors)"
    config = configuration(arch or "amos_base", settings, source)
    for name in weights:
        if name.endswith("relative_position.table.weight"):
            weights[name] = shift_buckets(weights[name], config.model)
    model = build_model(config, release_tokenizer)
    newly_initialized = fill(model, weights, torch.arange(num_tokens))
    remarks = [f"MLM heads at depths {depths}"] if has_generator else []
    unexpected_keys = sorted(set(theirs) - used - set(_TIED))
    return Imported(config, model, release_tokenizer, source, newly_initialized, unexpected_keys, remarks)


def read_release(path: Path) -> Weights:
    """Return the weights of the file, in float32; a class that is not in ``ALLOWED`` is refused."""
    replaced_classes = [(Inert, name) for name in ALLOWED]
    with explain_load_errors(str(path)), torch.serialization.safe_globals(replaced_classes):
        state = torch.load(path, map_location="cpu", weights_only=True)
    model = state.get("model") if isinstance(state, dict) else None
    for name in (EMBEDDING, _POSITIONS, _BIAS_TABLE, _FIRST_FFN):
        if not isinstance(model, dict) or getattr(model.get(name), "ndim", 0) != 2:
            raise UserError(f"{path} is not the checkpoint that the AMOS authors released: it lacks the matrix {name}")
    tensors = {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def settings_of_shapes(weights: Weights) -> dict[str, Any]:
    """Return our flags, from the shapes of their weights and the authors' code."""
    return {
        "encoder_embed_dim": weights[EMBEDDING].size(1),
        "encoder_ffn_embed_dim": weights[_FIRST_FFN].size(0),
        "encoder_attention_heads": weights[_BIAS_TABLE].size(1),
        "max_positions": weights[_POSITIONS].size(0),
        "layer_norm_eps": 1e-5,  # fairseq's LayerNorm, everywhere in their code
        "relative_position_scheme": "amos",
        "relative_position_buckets": weights[_BIAS_TABLE].size(0),
        "relative_position_max_distance": _MAX_DISTANCE,
    }


def shift_buckets(table: Tensor, settings: Any) -> Tensor:
    """Move the rows of their table of relative positions [buckets,H] to where our scheme ``amos`` looks them up.

    Their row 0 belongs to the most distant key to the left that the model can have: they subtract the smallest bucket of all
    positions. Ours belongs to the largest distance of the scheme, which a model with fewer than 128 positions does not reach.
    """
    farthest = torch.tensor([1 - settings.max_positions])
    return table.roll(amos_bucket(farthest, len(table), settings.relative_position_max_distance).item(), dims=0)
