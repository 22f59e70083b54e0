"""Models of every objective that are small enough for naive loops, their criterions, and batches as the task makes them."""

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.optim.sgd import SGD
from omegaconf import OmegaConf
from torch import Tensor, nn

from amos_fairseq.criterions.amos import AmosCriterion
from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.criterions.electric import ElectricCriterion
from amos_fairseq.criterions.mlm import MlmCriterion
from amos_fairseq.criterions.teams import TeamsCriterion
from amos_fairseq.downstream.model import FineTunedModel, TextModel
from amos_fairseq.functional import sampling
from amos_fairseq.functional.sampling import TopK
from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.teams import TeamsConfig, TeamsModel
from amos_fairseq.modules import mixture as mixtures
from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.modules.deberta_encoder import DebertaEncoderConfig
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.optim.grouped_adam import GroupedAdamConfig

NUM_TOKENS = 40  # ordinary tokens of the vocabulary: ids 4 to 43
BLOCK_LENGTH = 12
MASK_PROB = 0.25
MASKED_SHARE = math.ceil(MASK_PROB * BLOCK_LENGTH) / BLOCK_LENGTH

ENCODER_SETTINGS = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "max_positions": 20,
    # Distances up to 11 reach the logarithmic buckets.
    "relative_position_buckets": 8,
    "relative_position_max_distance": 9,
    # Large initial values: every path then carries a gradient that is far from rounding errors.
    "init_std": 0.3,
    "linear_init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
AMOS_SETTINGS = ENCODER_SETTINGS | {"generator_depths": "1,2,4", "max_update": 30}
# Narrow embeddings, so that both networks project them.
ELECTRA_SETTINGS = ENCODER_SETTINGS | {"embedding_dim": 8, "generator_size": 0.5, "max_update": 30}
# Four layers: half of a generator that is half as deep is one layer.
TEAMS_SETTINGS = ENCODER_SETTINGS | {"encoder_layers": 4, "negative_samples": 3}

EQUAL_SIZES = {"generator_size": 1.0}
# One of each kind of sections 5.3, 5.4.3 and 5.5 of the thesis.
ELECTRA_VARIANTS = {
    "plain": {},
    "none": {"share_weights": "none"},
    "all": {"share_weights": "all", **EQUAL_SIZES},
    "layers": {"generator_layers": 1},
    "unigram": {"generator": "unigram"},
    "uniform": {"generator": "uniform"},
    "temperature": {"generator_temperature": 2.0},
    "disallow": {"disallow_true_token": True},
    "adversarial": {"adversarial": True},
    "frozen": {"generator_checkpoint": "mlm"},
    "replace_mlm": {"main_objective": "replace_mlm"},
    "all_tokens_mlm": {"main_objective": "all_tokens_mlm"},
}
# The settings that each variant requires.
ELECTRIC_VARIANTS = {
    "electric": {},
    "electra_tt": {},
    "electra_labels": {},
    "two_tower": {"generator_size": 1.0, "generator_loss_tokens": "all"},
}
# A narrow window, so that most pairs are outside of it; as wide as the embeddings.
MODERN = {"encoder": "modernbert", "relative_position_scheme": "none", "local_attention": 6, "embedding_dim": 0}
DEBERTA = {"encoder": "deberta", "relative_position_scheme": "none", "embedding_dim": 0}
# ELECTRA's generator with a mask decoder.
DEBERTA_PAIR = DEBERTA | {"generator_layers": 2, "generator_size": 1.0, "disentangled_embeddings": True}
ONLY_RTD = {"mws_loss_weight": 0.0, "representation": "rtd"}
ONLY_MWS = {"rtd_loss_weight": 0.0}
TEAMS_LAYOUTS = [
    {},
    {"task_heads": "extra_layer"},
    {"task_heads": "ffn"},
    {"share_layers": "none"},
    {"share_layers": "all"},
    {"representation": "rtd"},
    {"relative_position_scheme": "t5", "embedding_dim": 8, "token_types": 2},
    ONLY_MWS,
    ONLY_RTD,
]


def small_dictionary(num_tokens: int = NUM_TOKENS) -> Dictionary:
    """``<s> <pad> </s> <unk>``, ordinary tokens from id 4 on, ``<mask>`` last."""
    dictionary = Dictionary()
    for number in range(num_tokens):
        dictionary.add_symbol(f"word{number}")
    dictionary.add_symbol("<mask>")
    return dictionary


def small_task(
    num_tokens: int = NUM_TOKENS, block_length: int = BLOCK_LENGTH, mask_prob: float = MASK_PROB
) -> SimpleNamespace:
    """The attributes of a pretraining task that models and criterions read."""
    dictionary = small_dictionary(num_tokens)
    masked_share = math.ceil(mask_prob * block_length) / block_length
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        masked_share=masked_share,
        load_generator=lambda cfg: [
            network
            for name in cfg.generator_checkpoint.split(":")
            for network in GENERATORS[name]().generator_networks()
        ],
    )


def fine_tuning_task(model_class: type[FineTunedModel] = TextModel) -> SimpleNamespace:
    """A task that does not pretrain: models build their encoder in this class."""
    return SimpleNamespace(source_dictionary=small_dictionary(), model_class=model_class)


# Sizes of an encoder of width 8, without dropout.
WIDTH_8 = {"width": 8, "ffn_width": 12, "num_heads": 2, "layer_norm_eps": 1e-5}
WIDTH_8 |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)


def encoder_config(**settings: Any) -> BertEncoderConfig:
    """The configuration of an encoder with three layers."""
    positions = {"max_positions": 10, "position_scheme": "t5", "position_buckets": 8, "position_max_distance": 9}
    return BertEncoderConfig(**(WIDTH_8 | {"num_layers": 3} | positions | settings))


def modern_config(**settings: Any) -> ModernBertEncoderConfig:
    """The configuration of a ModernBERT with four layers (global, local, local, global)."""
    return ModernBertEncoderConfig(**(WIDTH_8 | {"num_layers": 4, "max_positions": 1024} | settings))


def deberta_config(**settings: Any) -> DebertaEncoderConfig:
    """The configuration of a DeBERTaV3 with three layers, whose logarithmic buckets begin beyond a distance of 2."""
    positions = {"max_positions": 20, "position_buckets": 8, "position_max_distance": 9}
    return DebertaEncoderConfig(**(WIDTH_8 | {"num_layers": 3} | positions | settings))


def bf16_optimizer(flags: GroupedAdamConfig, parameters: Iterable[nn.Parameter]) -> FP16Optimizer:
    """fairseq's wrapper, which updates float32 copies of the parameters."""
    common = {"bf16": True, "fp16_no_flatten_grads": True, "fp16_scale_window": 4}
    cfg = OmegaConf.create({"common": common, "optimizer": vars(flags) | {"_name": "grouped_adam"}})
    return FP16Optimizer.build_optimizer(cfg, list(parameters))


def sgd(rate: float) -> SGD:
    """fairseq's, of one parameter, for a schedule."""
    cfg = OmegaConf.create({"lr": [rate], "momentum": 0.0, "weight_decay": 0.0})
    return SGD(cfg, [nn.Parameter(torch.zeros(1))])


@torch.no_grad()
def build_encoder(config: TransformerConfig) -> TransformerEncoder:
    """An encoder in float64 with large weights; LayerNorms are random, too."""
    torch.manual_seed(0)
    module = config.build().double()
    for parameter in module.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return module


def build_randomized(
    model_class: type[BaseFairseqModel], config: Any, task: SimpleNamespace, seed: int = 0
) -> BaseFairseqModel:
    """Build a model in training mode; LayerNorms, biases and v, which start as ones and zeros, are random as well."""
    torch.manual_seed(seed)
    return randomize(model_class.build_model(config, task)).train()


@torch.no_grad()
def randomize(model: BaseFairseqModel) -> BaseFairseqModel:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def small_amos(seed: int = 0, **settings: Any) -> AmosModel:
    return build_randomized(AmosModel, AmosConfig(**(AMOS_SETTINGS | settings)), small_task(), seed)


def small_electra(seed: int = 0, num_tokens: int = NUM_TOKENS, **settings: Any) -> ElectraModel:
    return build_randomized(ElectraModel, ElectraConfig(**(ELECTRA_SETTINGS | settings)), small_task(num_tokens), seed)


def small_electric(variant: str = "electric", seed: int = 0, **settings: Any) -> ElectricModel:
    own = {"electric_variant": variant, "generator_size": 0.5, "mask_prob": MASK_PROB} | ELECTRIC_VARIANTS[variant]
    return build_randomized(ElectricModel, ElectricConfig(**(ENCODER_SETTINGS | own | settings)), small_task(), seed)


def small_teams(seed: int = 0, task: SimpleNamespace | None = None, **settings: Any) -> TeamsModel:
    return build_randomized(TeamsModel, TeamsConfig(**(TEAMS_SETTINGS | settings)), task or small_task(), seed)


def small_mlm(**settings: Any) -> MlmModel:
    return build_randomized(MlmModel, EncoderConfig(**(ENCODER_SETTINGS | settings)), small_task())


# What a frozen generator comes from, by what stands for the name of its file: other sizes, depths and encoders than the rest.
GENERATORS = {
    "mlm": lambda: small_mlm(encoder_layers=3, dropout=0.5),
    "narrow": lambda: small_mlm(encoder_layers=1, encoder_embed_dim=8, embedding_dim=12),
    "modern": lambda: small_mlm(encoder="modernbert", encoder_embed_dim=24),
    "electra": small_electra,
    "teams": small_teams,
    "amos": small_amos,
    "amos_separate": lambda: small_amos(separate_generators=True),
}


def amos_criterion(
    discriminator_loss_weight: float = 50.0, encoder_mlm_weight: float = 0.0, **task: Any
) -> AmosCriterion:
    return AmosCriterion(small_task(**task), discriminator_loss_weight, encoder_mlm_weight)


def electra_criterion(discriminator_loss_weight: float = 50.0, **settings: Any) -> ElectraCriterion:
    return ElectraCriterion(small_task(), discriminator_loss_weight, **settings)


def electric_criterion(model: ElectricModel, discriminator_loss_weight: float = 50.0) -> ElectricCriterion:
    return ElectricCriterion(small_task(), discriminator_loss_weight, model.cfg.generator_loss_tokens)


def teams_criterion(model: TeamsModel, mlm_loss_weight: float = 1.0) -> TeamsCriterion:
    """The other weights are the model's, as the recipes' interpolation sets them."""
    return TeamsCriterion(small_task(), mlm_loss_weight, model.cfg.rtd_loss_weight, model.cfg.mws_loss_weight)


def model_and_criterion(objective: str, **settings: Any) -> tuple[Any, Any]:
    """A small model and its criterion; "two_tower" is a variant of Electric."""
    if objective == "mlm":
        return small_mlm(**settings), MlmCriterion(small_task())
    if objective == "amos":
        return small_amos(**settings), amos_criterion()
    if objective == "electra":
        return small_electra(**settings), electra_criterion()
    if objective == "teams":
        model = small_teams(**settings)
        return model, teams_criterion(model)
    model = small_electric(objective, **settings)
    return model, electric_criterion(model)


def nll(logits: Sequence[float], place: int) -> float:
    """-log softmax(logits)[place]."""
    return math.log(sum(map(math.exp, logits))) - logits[place]


def logged(criterion: type[FairseqCriterion], *logging_outputs: dict[str, Any]) -> dict[str, float]:
    """What fairseq logs of these batches."""
    with metrics.aggregate(new_root=True) as aggregated:
        criterion.reduce_metrics(list(logging_outputs))
    return dict(aggregated.get_smoothed_values())


def small_batch(
    lengths: Sequence[int] = (12, 7, 12, 10), seed: int = 0, num_columns: int = BLOCK_LENGTH, slots: int | None = None
) -> dict[str, Any]:
    """Blocks of ``lengths`` real tokens, padded to ``num_columns``; a short block leaves padded slots of masked positions."""
    generator = torch.Generator().manual_seed(seed)
    dictionary = small_dictionary()
    pad, mask = dictionary.pad(), dictionary.index("<mask>")
    slots = slots or math.ceil(MASK_PROB * BLOCK_LENGTH)
    tokens = torch.full((len(lengths), num_columns), pad)
    positions = torch.zeros(len(lengths), slots, dtype=torch.int64)
    weights = torch.zeros(len(lengths), slots)
    for row, length in enumerate(lengths):
        tokens[row, 0] = dictionary.bos()
        tokens[row, 1:length] = torch.randint(4, 4 + NUM_TOKENS, (length - 1,), generator=generator)
        count = math.ceil(MASK_PROB * length)
        positions[row, :count] = (1 + torch.randperm(length - 1, generator=generator)[:count]).sort().values
        weights[row, :count] = 1
    masked_tokens = tokens.clone()
    for row, slot in weights.nonzero().tolist():
        masked_tokens[row, positions[row, slot]] = mask
    net_input = {"tokens": tokens, "masked_tokens": masked_tokens}
    net_input |= {"masked_positions": positions, "masked_weights": weights}
    return {"id": torch.arange(len(lengths)), "first_id": 0} | batch_of(net_input)


def batch_of(net_input: dict[str, Tensor]) -> dict[str, Any]:
    """The tensors of a batch with their counts."""
    return {
        "nsentences": len(net_input["tokens"]),
        "ntokens": int(net_input["tokens"].ne(1).sum()),
        "num_masked": int(net_input["masked_weights"].sum()),
        "net_input": net_input,
    }


def masked_slots(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Row, slot and position of every masked token."""
    slots = batch["net_input"]["masked_weights"].nonzero().tolist()
    return [(row, slot, batch["net_input"]["masked_positions"][row, slot].item()) for row, slot in slots]


def random_replaced(batch: dict[str, Any], generator: torch.Generator) -> Tensor:
    """[B,T] bool: 70 % of the masked tokens."""
    replaced = torch.zeros(batch["net_input"]["tokens"].shape, dtype=torch.bool)
    for row, _, position in masked_slots(batch):
        replaced[row, position] = torch.rand(1, generator=generator).item() < 0.7
    return replaced


def gumbel(*shape: int, seed: int = 0) -> Tensor:
    """Gumbel(0, 1) noise by the inverse of its distribution function, float32 values."""
    uniform = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.clamp(1e-12, 1 - 1e-12).log()).log().float()


def set_samples(model: Any, sampled: Tensor, candidates: Tensor | None = None) -> None:
    """Make ``model`` use given replacements [B,M], and for TEAMS candidates [B,M,1+K], with every kernel."""
    of_reference = sampled if candidates is None else (sampled, candidates)
    of_sampler = (sampled,) if candidates is None else (sampled, candidates[..., 1:])
    mlm_loss_and_sample = type(model).mlm_loss_and_sample
    model.sample = lambda *arguments: of_reference
    model.mlm_loss_and_sample = lambda *arguments: (*mlm_loss_and_sample(model, *arguments)[:2], of_sampler)


def set_gumbel_noise(monkeypatch: pytest.MonkeyPatch, noise: Tensor) -> None:
    """Make AMOS perturb its mixture with the noise [B,M,V], with every kernel, for batches of B sequences."""

    def perturbed(weights: Tensor) -> Tensor:
        return weights.log() + noise.view_as(weights)

    def top_k_of_noise(weights: Tensor, k: int) -> TopK:
        largest = perturbed(weights).topk(k)
        return TopK(largest.indices, largest.values, (-largest.values[:, -1:]).double().exp())

    monkeypatch.setattr(mixtures, "gumbel_noise", lambda like: noise.view_as(like))
    monkeypatch.setattr(
        sampling, "sample_with_replacement", lambda weights, count: perturbed(weights).topk(count).indices
    )
    monkeypatch.setattr(sampling, "gumbel_top_k_sampling", top_k_of_noise)
