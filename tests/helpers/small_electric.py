"""An Electric small enough for naive loops, and the naive loops: one text, one token, one key at a time, in float64."""

import copy
import math

import torch
from small_models import MASK_PROB, SETTINGS, TOKENS, small_task
from torch import Tensor
from torch.nn.functional import gelu

from amos_fairseq.criterions.electric import ElectricCriterion
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.modules.encoder import TransformerEncoder

# What each variant cannot do without.
VARIANTS = {
    "electric": {},
    "electra_tt": {},
    "two_tower": {"generator_size": 1.0, "generator_loss_tokens": "all"},
}
SHARE = math.ceil(MASK_PROB * TOKENS) / TOKENS


def small_electric(variant: str = "electric", seed: int = 0, **settings) -> ElectricModel:
    """In training mode, no dropout unless asked for; LayerNorms and biases are random as well."""
    common = {name: value for name, value in SETTINGS.items() if name not in ("generator_depths", "max_update")}
    common |= {"electric_variant": variant, "generator_size": 0.5, "mask_prob": MASK_PROB}
    torch.manual_seed(seed)
    cfg = ElectricConfig(**(common | VARIANTS[variant] | settings))
    model = ElectricModel.build_model(cfg, small_task())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def electric_criterion(model: ElectricModel, discriminator_loss_weight: float = 50.0) -> ElectricCriterion:
    return ElectricCriterion(small_task(), discriminator_loss_weight, model.cfg.generator_loss_tokens)


def in_float64(model: ElectricModel) -> ElectricModel:
    return copy.deepcopy(model).double().eval()


def naive_tower(tower: TransformerEncoder, embeddings: Tensor, keys_of) -> Tensor:
    """[L,E] float64, a text without padding -> [L,G]; query i reads the keys ``keys_of(i, L)`` and no other."""
    length = len(embeddings)
    states = tower.embedding_norm(embeddings + tower.embed_positions.weight[:length])
    if tower.embedding_projection is not None:
        states = tower.embedding_projection(states)
    bias = torch.zeros(99, length, length) if tower.relative_position is None else tower.relative_position(length)
    for layer in tower.layers:
        heads = layer.attention.num_heads
        query, key, value = (x.view(length, heads, -1) for x in layer.attention.query_key_value(states).chunk(3, -1))
        mixed = torch.zeros_like(value)
        for i in range(length):
            keys = list(keys_of(i, length))
            for h in range(heads):
                scores = torch.stack(
                    [query[i, h] @ key[j, h] / math.sqrt(query.size(-1)) + bias[h, i, j] for j in keys]
                )
                mixed[i, h] = scores.softmax(0) @ value[keys, h]
        states = layer.attention_norm(states + layer.attention.output(mixed.view(length, -1)))
        states = layer.ffn_norm(states + layer.ffn_out(gelu(layer.ffn_in(states))))
    return states


@torch.no_grad()
def naive_cloze(model: ElectricModel, text: Tensor) -> Tensor:
    """Logits [L,V] float64 of every token of ``text`` [L] from the two sides of it."""
    model = in_float64(model)
    embeddings, length = model.embed_tokens(text), len(text)
    past = naive_tower(model.generator.past, embeddings, lambda i, length: range(i + 1))
    future = naive_tower(model.generator.future, embeddings, range)
    before, behind = model.generator.boundaries.weight
    logits = []
    for t in range(length):
        left = past[t - 1] if t > 0 else before
        right = future[t + 1] if t + 1 < length else behind
        hidden = model.mlm_head(torch.cat([left, right]))
        logits.append(model.embed_tokens.weight @ hidden + model.mlm_head.bias)
    return torch.stack(logits)


@torch.no_grad()
def naive_energies(model: ElectricModel, text: Tensor) -> Tensor:
    """E [L] float64 of a text without padding; the head's own number in ELECTRA-TT."""
    model = in_float64(model)
    states = model.discriminator(model.embed_tokens(text[None]))[-1]
    hidden = gelu(model.detection_head.dense(states))
    return model.detection_head.output(hidden)[0, :, 0]


def naive_noise_probs(model: ElectricModel, logits: Tensor) -> Tensor:
    """q [L,V]: the softmax over the words alone."""
    words = [row for row in range(logits.size(1)) if not model.never_sampled_mask[row]]
    probs = torch.zeros_like(logits)
    probs[:, words] = logits[:, words].softmax(-1)
    return probs
