"""The networks of a pretraining checkpoint that Hugging Face has a class for: masked language models and discriminators."""

import dataclasses
from typing import Optional

from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_parts import Part, encoder_weights, named
from amos_fairseq.interop.hugging_face_tables import DETECTION, ENERGY, MASKED_LM, PRETRAINING
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.encoder import TransformerEncoder, with_last_layer
from amos_fairseq.modules.heads import DenseDetectionHead, MlmHead

LABELS = {"id2label": {0: "original", 1: "replaced"}, "label2id": {"original": 0, "replaced": 1}}


def generator_part(pretrained: Pretrained, depth: Optional[str]) -> Part:
    """The generator up to ``depth``, the deepest without it.

    Raises:
        UserError: there is none that a class of Hugging Face's computes, or it has no such depth.
    """
    model = pretrained.model
    if depth is not None and depth not in model.depth_names:
        raise UserError(f"--depth {depth} is no depth of this generator: it has {', '.join(model.depth_names)}")
    name = depth or model.depth_names[-1]
    if isinstance(model, AmosModel):
        index = model.depth_names.index(name)
        encoder = model.generators[index] if model.cfg.separate_generators else model.generators[0]
        head, num_layers = model.head_of_depth[index], model.depths[index]
    elif isinstance(getattr(model, "generator", None), TransformerEncoder):  # ELECTRA's and TEAMS's, not two towers
        encoder, head, num_layers = model.generator, model.mlm_head, len(model.generator.layers)
    else:
        raise UserError(f"{pretrained.file} has no generator that a masked language model of Hugging Face's could be")
    return _masked_lm(pretrained, encoder, head, num_layers, f"the generator at depth {name}")


def mlm_part(pretrained: Pretrained, model: MlmModel) -> Part:
    """MLM's only network with its head."""
    num_layers = len(model.transformer.layers)
    limits = "It guesses masked words. Its encoder can be fine-tuned: AutoModel and its relatives read this folder too."
    return _masked_lm(pretrained, model.transformer, model.mlm_head, num_layers, "the masked language model", limits)


def _masked_lm(
    pretrained: Pretrained,
    encoder: TransformerEncoder,
    head: MlmHead,
    num_layers: int,
    description: str,
    limits: str = "",
) -> Part:
    """The first ``num_layers`` layers under an MLM head."""
    model: PretrainingModel = pretrained.model
    embedding = model.generator_embedding
    num_tokens = len(pretrained.dictionary)

    def outputs(tokens: Tensor) -> Tensor:
        states = encoder(embedding(tokens), tokens.eq(model.vocabulary.pad))[num_layers - 1]
        return linear(head(states), embedding.weight, head.bias)[..., :num_tokens]

    weights = encoder_weights(embedding, encoder, num_layers) | named("mlm_head.", head)
    shape = dataclasses.replace(encoder.shape, num_layers=num_layers)
    activation = str(model.cfg.pooler_activation_fn)
    return Part(MASKED_LM, shape, weights, outputs, description, activation=activation, limits=limits)


def discriminator_part(pretrained: Pretrained) -> Part:
    """The discriminator with its detection head, or Electric's with that of its energies.

    Raises:
        UserError: there is none that a class of Hugging Face's computes.
    """
    model = pretrained.model
    head = getattr(model, "detection_head", None)
    if head is None or (isinstance(model, TeamsModel) and model.rtd_ffn is not None):
        reason = (
            "has no detection head" if head is None else "detects by a network on top of its encoder (--task-heads ffn)"
        )
        raise UserError(f"{pretrained.file} {reason}: export the encoder alone, with --part encoder")
    encoder = detecting_encoder(model)
    dense = isinstance(head, DenseDetectionHead)
    if dense and encoder.relative_position is not None:
        raise UserError(
            "no class of Hugging Face's has a detection head of two layers on relative positions: export the encoder alone, "
            "with --part encoder"
        )
    is_energy = isinstance(model, ElectricModel) and model.variant == "electric"
    return Part(
        ENERGY if is_energy else PRETRAINING if dense else DETECTION,
        encoder.shape,
        encoder_weights(model.embed_tokens, encoder) | named("detection_head.", head),
        lambda tokens: head(encoder(model.embed_tokens(tokens), tokens.eq(model.vocabulary.pad))[-1]),
        "the energies of tokens" if is_energy else "the discriminator",
        {} if is_energy else LABELS,
        str(model.cfg.pooler_activation_fn),
    )


def detecting_encoder(model: nn.Module) -> TransformerEncoder:
    """The encoder that the detection head stands on; of TEAMS the branch of that task, whichever is kept."""
    if not isinstance(model, TeamsModel):
        return model.encoder
    own_layer = getattr(model, "rtd_layer", None)
    return model.discriminator if own_layer is None else with_last_layer(model.discriminator, own_layer)
