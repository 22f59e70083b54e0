"""Equal work with Hugging Face's ``transformers``, as users of that library write it: a pretraining step, and fine-tuning.

``transformers`` has no ELECTRA pretraining, only the two networks. Here the MLM head is applied to the masked positions only,
and both encoders use PyTorch's fused attention (sdpa). Before version 5 the library offers sdpa for BERT but not for ELECTRA;
the layers are the same, so BERT's encoder replaces ELECTRA's.

A recipe with ModernBERT's encoder is compared with the library's classes of that encoder, which have sdpa in every version.

Shapes: B sequences, T tokens, M masked positions per sequence, D hidden size of a network, V padded vocabulary size.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from training_step import Batch, Setup, moments_of, tensors_of
from transformers import (
    BertConfig,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    PretrainedConfig,
    get_linear_schedule_with_warmup,
)
from transformers.models.bert.modeling_bert import BertEncoder

from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.config import hugging_face_config
from amos_fairseq.hugging_face.weights import exported_token_types
from amos_fairseq.models.configuration import (
    MODERN,
    MODERN_ARCH,
    MODERN_SIZES,
    SIZES,
    PaddedVocabulary,
    generator_config,
    transformer_config,
)
from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.optim.grouped_adam import parse_betas
from amos_fairseq.recipes.composition import compose_recipe

INPUTS = ("tokens", "masked_tokens", "masked_positions")
# Settings of an ELECTRA recipe that Hugging Face's two networks support.
PLAIN_ELECTRA = {
    "model.relative_position_scheme": "none",
    "model.generator": "masked_lm",
    "model.generator_temperature": 1.0,
    "model.share_weights": "embeddings",
    "model.disallow_true_token": False,
    "model.adversarial": False,
    "model.generator_checkpoint": "",
    "model.main_objective": "detection",
    "model.disentangled_embeddings": False,
    "criterion.detection_positions": "all",
}
PLAIN_MLM = {"model.relative_position_scheme": "none"}
# Hugging Face's ModernBERT drops nothing where the layers add to their sum.
PLAIN_MODERN = {"model.dropout": 0.0}
PLAIN = {"model.activation_dropout": 0.0, "optimizer._name": "grouped_adam"}
# Settings that an ELECTRA recipe copies from the recipe of another objective when it becomes its peer.
COPIED = (
    "common.bf16",
    "common.fp16",
    "common.amp",
    "common.cpu",
    "common.seed",
    "task.precision",
    "task.tokens_per_sample",
    "task.mask_prob",
    "model.max_positions",
    "model.embedding_dim",
    "model.dropout",
    "model.attention_dropout",
    "model.layer_norm_eps",
    "dataset.batch_size",
    "dataset.max_tokens",
    "optimization.clip_norm",
    "optimization.update_freq",
    "distributed_training.distributed_world_size",
)


class HuggingFaceObjective(nn.Module):
    """Masked language modeling, plus replaced token detection if there is a discriminator, with the library's ELECTRA.

    Args:
        masked_lm: the generator, or BERT itself.
        discriminator: shares the embeddings of ``masked_lm``; None for BERT's objective.
        detection_weight: lambda.
    """

    def __init__(self, masked_lm: nn.Module, discriminator: nn.Module | None, detection_weight: float):
        super().__init__()
        self.masked_lm, self.discriminator = masked_lm, discriminator
        self.detection_weight = detection_weight
        if discriminator is not None:
            self.share_embeddings()
        self.use_fused_attention()

    def share_embeddings(self) -> None:
        """Let ``masked_lm`` use the embeddings of ``discriminator``, in its output layer too."""
        self.masked_lm.electra.embeddings = self.discriminator.electra.embeddings
        self.masked_lm.tie_weights()

    def use_fused_attention(self) -> None:
        """Replace eager attention by sdpa."""
        for network in filter(None, (self.masked_lm, self.discriminator)):
            network.electra.encoder = with_fused_attention(network)

    def forward(self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor) -> Tensor:
        """Return mean MLM loss over masked positions + lambda * mean detection loss over tokens (a scalar).

        Every block is full and every masked slot is used, as in synthetic text.

        Args:
            tokens, masked_tokens: [B,T] int64.
            masked_positions: [B,M] int64.
        """
        logits = self.predict_masked(masked_tokens, masked_positions).flatten(0, 1).float()  # [B*M,V]
        loss = F.cross_entropy(logits, tokens.gather(1, masked_positions).flatten())
        if self.discriminator is None:
            return loss
        corrupted = tokens.scatter(1, masked_positions, self.sample(logits.detach()).view_as(masked_positions))
        detected = self.detect(self.encode(self.discriminator, corrupted))
        replaced = corrupted.ne(tokens).float()
        return loss + self.detection_weight * F.binary_cross_entropy_with_logits(detected.float(), replaced)

    def predict_masked(self, masked_tokens: Tensor, masked_positions: Tensor) -> Tensor:
        """Return the logits at the masked positions: [B,M,V]."""
        states = self.encode(self.masked_lm, masked_tokens)
        states = states.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, states.size(-1)))  # [B,M,D]
        return self.predict(states)

    def predict(self, states: Tensor) -> Tensor:
        """Return the logits of the masked language model: [...,D] -> [...,V]."""
        return self.masked_lm.generator_lm_head(self.masked_lm.generator_predictions(states))

    def detect(self, states: Tensor) -> Tensor:
        """Return the logits of "replaced": [B,T,D] -> [B,T]."""
        return self.discriminator.discriminator_predictions(states)

    def encode(self, network: nn.Module, tokens: Tensor) -> Tensor:
        """Return the last hidden states of a network: [B,T] -> [B,T,D]."""
        electra = network.electra
        states = electra.embeddings(tokens)
        if hasattr(electra, "embeddings_project"):
            states = electra.embeddings_project(states)
        return electra.encoder(states)[0]  # no mask: nothing is padded

    def sample(self, logits: Tensor) -> Tensor:
        """Sample a token from each softmax: [N,V] float32 -> [N] int64."""
        return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)


class ModernBertObjective(HuggingFaceObjective):
    """The same with the library's ModernBERT: ``ModernBertForMaskedLM``, and token classification with one label.

    Its embeddings are as wide as the network. A generator that is narrower than the discriminator gets a projection of the
    shared embeddings, and a head and an output layer of their width, as in the library's ELECTRA.
    """

    def share_embeddings(self) -> None:
        generator, shared = self.masked_lm, self.discriminator.model.embeddings
        wide, narrow = self.discriminator.config.hidden_size, generator.config.hidden_size
        if wide == narrow:
            generator.model.embeddings = shared
        else:
            generator.model.embeddings.tok_embeddings = nn.Identity()  # it gets projected embeddings
            self.projection = nn.Linear(wide, narrow, bias=False)
            generator.head.dense = nn.Linear(narrow, wide, bias=False)
            generator.head.norm = nn.LayerNorm(wide, generator.config.norm_eps, bias=False)
            generator.decoder = nn.Linear(wide, generator.config.vocab_size)
        generator.decoder.weight = shared.tok_embeddings.weight

    def use_fused_attention(self) -> None:
        for network in filter(None, (self.masked_lm, self.discriminator)):
            network.set_attn_implementation("sdpa")

    def encode(self, network: nn.Module, tokens: Tensor) -> Tensor:
        if network is self.masked_lm and hasattr(self, "projection"):
            embeddings = self.discriminator.model.embeddings(tokens)
            return network.model(inputs_embeds=self.projection(embeddings)).last_hidden_state
        return network.model(tokens).last_hidden_state

    def predict(self, states: Tensor) -> Tensor:
        return self.masked_lm.decoder(self.masked_lm.head(states))

    def detect(self, states: Tensor) -> Tensor:
        return self.discriminator.classifier(self.discriminator.head(states)).squeeze(-1)


def with_fused_attention(network: nn.Module) -> BertEncoder:
    """Return BERT's encoder with sdpa and the weights of the network's own encoder."""
    settings = {name: value for name, value in network.config.to_dict().items() if name != "model_type"}
    encoder = BertEncoder(BertConfig(**settings, attn_implementation="sdpa"))
    encoder.load_state_dict(network.electra.encoder.state_dict())
    return encoder


def build_objective(cfg: DictConfig, vocabulary_size: int, pad: int) -> HuggingFaceObjective:
    """Build networks of the sizes of ``cfg``, an ``electra`` or ``mlm`` recipe.

    Args:
        vocabulary_size: V, padded.
    """
    main = network_config(transformer_config(cfg.model), vocabulary_size, pad)
    objective, masked_lm, detector = HuggingFaceObjective, ElectraForMaskedLM, ElectraForPreTraining
    if cfg.model.encoder == MODERN:
        objective, masked_lm, detector = ModernBertObjective, ModernBertForMaskedLM, ModernBertForTokenClassification
        main.num_labels = 1
    if cfg.criterion._name == "mlm":
        return objective(masked_lm(main), None, 0.0)
    generator = network_config(generator_config(cfg.model, cfg.model.generator_layers), vocabulary_size, pad)
    return objective(masked_lm(generator), detector(main), cfg.criterion.discriminator_loss_weight)


def network_config(shape: TransformerConfig, vocabulary_size: int, pad: int) -> PretrainedConfig:
    """Return the configuration of the library's ELECTRA, or ModernBERT, with eager attention."""
    if isinstance(shape, ModernBertEncoderConfig):
        return hugging_face_config(
            MODERN,
            shape,
            vocabulary_size,
            pad_token_id=pad,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    return ElectraConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.width,
        embedding_size=shape.embedding_width or shape.width,
        intermediate_size=shape.ffn_width,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.attention_dropout,
        type_vocab_size=exported_token_types("electra", shape.num_token_types),
        attn_implementation="eager",
        layer_norm_eps=shape.layer_norm_eps,
        vocab_size=vocabulary_size,
        pad_token_id=pad,
    )


class HuggingFaceStep:
    """A training step with float32 weights, autocast for 16-bit precisions, fused AdamW and clipping."""

    def __init__(self, setup: Setup, module: nn.Module):
        self.module = module.to(setup.device).train()
        self.device, self.dtype = setup.device, setup.dtype
        self.clip_norm = setup.cfg.optimization.clip_norm
        self.optimizer = fused_adamw(module, setup.cfg)
        self.scaler = torch.amp.GradScaler(setup.device.type, enabled=setup.precision == "fp16")

    def step(self, batch: Batch) -> None:
        """Run forward, backward, clipping and optimizer."""
        inputs = {name: batch["net_input"][name].to(self.device, non_blocking=True) for name in INPUTS}
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.module(**inputs)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        loss.item()  # the loss is logged, as in our step

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def state(self) -> Iterator[Tensor]:
        yield from tensors_of(self.module)
        yield from moments_of(self.optimizer)


def fused_adamw(module: nn.Module, cfg: DictConfig) -> torch.optim.AdamW:
    """Build the recipe's optimizer with weight decay for matrices but not vectors, as in the library's examples."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    lr, betas = cfg.optimization.lr[0], parse_betas(cfg.optimizer.adam_betas)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=cfg.optimizer.adam_eps, fused=True)


def comparable_setup(setup: Setup) -> tuple[Setup, str]:
    """Return the ``electra`` or ``mlm`` configuration for Hugging Face's networks, and how it differs from ours."""
    objective = setup.cfg.criterion._name
    if objective in ("electra", "mlm"):
        plain = PLAIN_ELECTRA if objective == "electra" else PLAIN_MLM
        check_supported(setup.cfg, plain | (PLAIN_MODERN if setup.cfg.model.encoder == MODERN else {}))
        return setup, ""
    cfg = electra_of_equal_size(setup.cfg)
    check_supported(cfg, PLAIN_ELECTRA)
    return (
        dataclasses.replace(setup, cfg=cfg),
        f"ELECTRA instead of {objective}: the main encoder, batch, length and vocabulary are equal, generator and "
        "objective are not",
    )


def check_supported(cfg: DictConfig, plain: dict[str, object]) -> None:
    for key, expected in (plain | PLAIN).items():
        group, name = key.split(".")
        if cfg[group][name] != expected:
            raise UserError(
                f"{key}={cfg[group][name]} is not supported by Hugging Face's networks: leave out hf, or set {key}={expected}"
            )


def electra_of_equal_size(cfg: DictConfig) -> DictConfig:
    """Return the ELECTRA recipe with the same encoder, and the batch, length, embedding width and dropout of ``cfg``."""
    modern = {f"{MODERN_ARCH}_{size}": values for size, values in MODERN_SIZES.items()}
    sizes = modern if cfg.model.encoder == MODERN else SIZES
    for size, values in sizes.items():
        if all(cfg.model[name] == value for name, value in values.items()):
            electra = compose_recipe(f"electra_{size}")
            break
    else:
        raise UserError(
            "no ELECTRA recipe has an encoder of these sizes to compare with: leave out hf, or use the sizes of a recipe "
            f"({', '.join(sizes)})"
        )
    for key in COPIED:
        group, name = key.split(".")
        electra[group][name] = cfg[group][name]
    return electra


class FineTuningLoop:
    """Fine-tuning as users of the library write it: AdamW, a linear schedule, no clipping, rows padded to the longest one.

    Args:
        rows: token ids of each row.
        targets: class of each row [N].
    """

    def __init__(self, cfg: DictConfig, device: torch.device, vocabulary: PaddedVocabulary, rows: Any, targets: Tensor):
        config = network_config(transformer_config(cfg.model), vocabulary.padded_size, vocabulary.pad)
        config.num_labels = int(targets.max()) + 1
        config.classifier_dropout = cfg.model.pooler_dropout
        config._attn_implementation = "sdpa"
        is_modern = cfg.model.encoder == MODERN
        model_class = ModernBertForSequenceClassification if is_modern else ElectraForSequenceClassification
        self.model = model_class(config).to(device).train()
        lr, weight_decay = cfg.optimization.lr[0], cfg.optimizer.weight_decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=weight_decay)
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 10, 100_000)
        self.device, self.pad, self.rows, self.targets = device, vocabulary.pad, rows, targets

    def update(self, ids: list[int]) -> Tensor:
        """Train on the rows ``ids``; return the loss, a scalar."""
        rows = [self.rows[index] for index in ids]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.pad).to(self.device)
        mask = tokens.ne(self.pad).long()
        output = self.model(input_ids=tokens, attention_mask=mask, labels=self.targets[ids].to(self.device))
        output.loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return output.loss.detach()
