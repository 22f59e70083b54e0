"""Weights through the tables of :mod:`amos_fairseq.interop.hugging_face_tables`, in both directions.

Rows of the vocabulary stay in the order in which they come: :mod:`amos_fairseq.interop.hugging_face_rows` reorders them.
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.hugging_face_tables import (
    ENCODER,
    FAMILIES,
    MASKED_LM,
    PLUS_2,
    Q_K_V,
    ZERO_AND_W,
    Family,
    Row,
)

Weights = dict[str, Tensor]

TOKEN_TYPES = "encoder.embed_token_types.weight"
PROJECTION = "encoder.embedding_projection."
# What an exported BERT gets where ours has no token types: tokenizers of pairs send types 0 and 1.
EXPORTED_TOKEN_TYPES = 2
# How the first BERTs wrote a LayerNorm.
_FORMER_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


class Converted(NamedTuple):
    """Weights under our names, and the names of those that have no place here, as the file spells them."""

    weights: Weights
    leftover: list[str]


def to_hugging_face(family: str, part: str, weights: Weights) -> Weights:
    """State of the class ``FAMILIES[family].classes[part]``, complete for ``load_state_dict(strict=True)``.

    A bare encoder is the class without a pooling layer. Tensors are copies, but for the tied ones. Positions without a
    number (the first two rows of MPNet's and RoBERTa's table) are zeros, as are token types that ours does not have.

    Args:
        family: mpnet, electra, bert or roberta.
        part: one of the parts that the family has (the tables' constants).
        weights: ours, flat, with at least the encoder and the head of ``part``; more is ignored.

    Raises:
        KeyError: a weight of the encoder or of the head is not there, or the family has no such part.
    """
    table = FAMILIES[family]
    rows = table.encoder + (table.heads[part] if part != ENCODER else ())
    given = _with_token_types(weights)
    converted: Weights = {}
    for ours, theirs, cell in one_by_one(rows, num_layers(weights, "encoder.layers.")):
        if ours.startswith(PROJECTION) and ours not in given:
            continue  # embeddings as wide as the encoder
        converted.update(zip(theirs, _to_cells(given[ours], cell), strict=True))
    if part == MASKED_LM:
        converted.update({copy: converted[source] for copy, source in table.tied.items()})
    if part == ENCODER:
        return {name.removeprefix(f"{table.prefix}."): tensor for name, tensor in converted.items()}
    return converted


def from_hugging_face(family: str, weights: Weights, parts: Collection[str] = ()) -> Converted:
    """The encoder of a Hugging Face state, and the heads of ``parts``, under our names.

    Bitwise what the state holds, but for a detection classifier whose first row is not 0: its rows' difference is the
    same function.

    Args:
        family: mpnet, electra, bert or roberta.
        weights: a state with or without a head; names with or without the prefix of the encoder.
        parts: heads that must be there too.

    Raises:
        UserError: a weight is missing, or the output layer of a wanted masked language model is not tied.
    """
    table = FAMILIES[family]
    names = {_present_name(name, table, weights): name for name in weights}
    rows = table.encoder + tuple(row for part in parts for row in table.heads[part])
    converted: Weights = {}
    used: set[str] = set()
    for ours, theirs, cell in one_by_one(rows, num_layers(names, f"{table.prefix}.encoder.layer.")):
        absent = [name for name in theirs if name not in names]
        if absent and ours.startswith(PROJECTION):
            continue
        if absent:
            raise UserError(
                f"the weight {absent[0]} is missing: these are not the whole weights of a {family} model"
                + "".join(f" with the head {part}" for part in parts)
            )
        converted[ours] = _from_cells([weights[names[name]] for name in theirs], cell)
        used.update(theirs)
    for copy, source in table.tied.items():
        if copy not in names or source not in used:
            continue
        if torch.equal(weights[names[copy]], weights[names[source]]):
            used.add(copy)
        elif MASKED_LM in parts:
            raise UserError(
                f"{names[copy]} differs from {names[source]}: the output layer of a masked language model is tied to "
                "the token embeddings here, so this one cannot be held; import the encoder alone (--arch amos_base, no "
                "--generator)"
            )
    return Converted(converted, sorted(original for present, original in names.items() if present not in used))


def one_by_one(rows: Collection[Row], layers: int) -> Iterator[tuple[str, list[str], str]]:
    """Every line once per layer and once per weight and bias: name here, names there, cell."""
    for row in rows:
        theirs = [row.theirs] if isinstance(row.theirs, str) else list(row.theirs)
        for layer in range(layers) if ".N." in row.ours else (0,):
            for kind in ("weight", "bias") if row.ours.endswith("*") else ("",):
                ours, *others = (_filled(name, layer, kind) for name in (row.ours, *theirs))
                yield ours, others, row.cell


def _filled(name: str, layer: int, kind: str) -> str:
    return name.replace(".N.", f".{layer}.").replace("*", kind)


def _to_cells(tensor: Tensor, cell: str) -> list[Tensor]:
    if cell == Q_K_V:
        return [part.clone() for part in tensor.chunk(3)]
    if cell == PLUS_2:
        return [torch.cat([tensor.new_zeros(2, tensor.size(1)), tensor])]
    if cell == ZERO_AND_W:
        return [torch.cat([torch.zeros_like(tensor), tensor])]
    return [tensor.clone()]


def _from_cells(tensors: list[Tensor], cell: str) -> Tensor:
    if cell == Q_K_V:
        return torch.cat(tensors)
    (tensor,) = tensors
    if cell == PLUS_2:
        return tensor[2:].clone()
    if cell == ZERO_AND_W:
        if len(tensor) != 2:
            raise UserError(f"a detection head has 2 labels, original and replaced; this classifier has {len(tensor)}")
        return tensor[1:] - tensor[:1]
    return tensor.clone()


def _with_token_types(weights: Weights) -> Weights:
    if TOKEN_TYPES in weights:
        return weights
    width = weights["encoder.embed_positions.weight"].size(1)
    return {**weights, TOKEN_TYPES: weights["encoder.embed_positions.weight"].new_zeros(EXPORTED_TOKEN_TYPES, width)}


def _present_name(name: str, table: Family, weights: Weights) -> str:
    """``name`` as the tables write it: today's spelling, with the prefix of the encoder."""
    for former, today in _FORMER_NAMES:
        name = name.replace(former, today)
    bare = not any(other.startswith(f"{table.prefix}.") for other in weights)
    return f"{table.prefix}.{name}" if bare else name


def num_layers(names: Collection[str], stem: str) -> int:
    """One more than the highest number that follows ``stem`` in ``names``."""
    numbers = [int(found.group(1)) for name in names if (found := re.match(rf"{re.escape(stem)}(\d+)\.", name))]
    return max(numbers, default=-1) + 1
