"""The same pretraining from parts of Hugging Face's ``transformers``, as users of that library write it.

``transformers`` has no ELECTRA pretraining, only the two networks. Two ways to put them together:

- best: the MLM head reads the masked positions alone; both encoders run PyTorch's fused attention (sdpa), which the
  library offers for BERT, and before version 5 not for ELECTRA: the layers are the same, so BERT's encoder takes the place
  of ELECTRA's.
- naive: the classes as they come, attention step by step (eager), logits of the whole vocabulary at every token.

Shapes: B sequences, T tokens, M masked positions a sequence, D width of a network, V rows of the vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import BertConfig, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining
from transformers.models.bert.modeling_bert import BertEncoder

from amos_fairseq.models.configuration import generator_config, transformer_config
from amos_fairseq.modules.encoder import TransformerConfig


class HuggingFaceObjective(nn.Module):
    """Masked language modelling, and detection of what a generator replaced where there is a discriminator.

    Args:
        guesser: the generator, or BERT itself.
        discriminator: reads the guesser's embeddings; None for BERT's objective.
        detection_weight: lambda.
        naive: which of the two ways.
    """

    def __init__(
        self,
        guesser: ElectraForMaskedLM,
        discriminator: ElectraForPreTraining | None,
        detection_weight: float,
        naive: bool,
    ):
        super().__init__()
        self.guesser, self.discriminator = guesser, discriminator
        self.detection_weight = detection_weight
        self.naive = naive
        networks = [guesser] if discriminator is None else [guesser, discriminator]
        if discriminator is not None:
            guesser.electra.embeddings = discriminator.electra.embeddings
            guesser.tie_weights()
        if not naive:
            for network in networks:
                network.electra.encoder = with_fused_attention(network)

    def forward(self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor) -> Tensor:
        """mean over masked positions of the MLM loss + lambda * mean over tokens of the detection loss (a scalar).

        Every block is full and every slot used, as in made-up text.

        Args:
            tokens, masked_tokens: [B,T] int64.
            masked_positions: [B,M] int64.
        """
        logits = self.guess(masked_tokens, masked_positions).flatten(0, 1).float()  # [B*M,V]
        loss = F.cross_entropy(logits, tokens.gather(1, masked_positions).flatten())
        if self.discriminator is None:
            return loss
        corrupted = tokens.scatter(1, masked_positions, self.sample(logits.detach()).view_as(masked_positions))
        detected = self.discriminator.discriminator_predictions(self.read(self.discriminator, corrupted))  # [B,T]
        replaced = corrupted.ne(tokens).float()
        return loss + self.detection_weight * F.binary_cross_entropy_with_logits(detected.float(), replaced)

    def guess(self, masked_tokens: Tensor, masked_positions: Tensor) -> Tensor:
        """Logits at the masked positions: [B,M,V]."""
        if self.naive:
            logits = self.guesser(masked_tokens).logits  # [B,T,V]
            return logits.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, logits.size(-1)))
        states = self.read(self.guesser, masked_tokens)
        states = states.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, states.size(-1)))  # [B,M,D]
        return self.guesser.generator_lm_head(self.guesser.generator_predictions(states))

    def read(self, network: nn.Module, tokens: Tensor) -> Tensor:
        """Last states of a network: [B,T] -> [B,T,D]."""
        electra = network.electra
        if self.naive:
            return electra(tokens)[0]
        states = electra.embeddings(tokens)
        if hasattr(electra, "embeddings_project"):
            states = electra.embeddings_project(states)
        return electra.encoder(states)[0]  # no mask: nothing is padded

    def sample(self, logits: Tensor) -> Tensor:
        """A row drawn from each softmax: [N,V] float32 -> [N] int64."""
        return torch.multinomial(logits.softmax(-1), 1).squeeze(-1)


def with_fused_attention(network: nn.Module) -> BertEncoder:
    """BERT's encoder with sdpa and the weights of the network's own."""
    settings = {name: value for name, value in network.config.to_dict().items() if name != "model_type"}
    encoder = BertEncoder(BertConfig(**settings, attn_implementation="sdpa"))
    encoder.load_state_dict(network.electra.encoder.state_dict())
    return encoder


def build_objective(cfg: DictConfig, num_rows: int, pad: int, naive: bool) -> HuggingFaceObjective:
    """Networks of the sizes of ``cfg``, an ``electra`` or ``mlm`` recipe; ``num_rows`` V and ``pad`` of its embeddings."""
    eps_and_rows = {"layer_norm_eps": cfg.model.layer_norm_eps, "vocab_size": num_rows, "pad_token_id": pad}
    main = network_config(transformer_config(cfg.model), **eps_and_rows)
    if cfg.criterion._name == "mlm":
        return HuggingFaceObjective(ElectraForMaskedLM(main), None, 0.0, naive)
    guesser = ElectraForMaskedLM(
        network_config(generator_config(cfg.model, cfg.model.generator_layers), **eps_and_rows)
    )
    return HuggingFaceObjective(guesser, ElectraForPreTraining(main), cfg.criterion.discriminator_loss_weight, naive)


def network_config(shape: TransformerConfig, **settings: Any) -> ElectraConfig:
    return ElectraConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.width,
        embedding_size=shape.embedding_width or shape.width,
        intermediate_size=shape.ffn_width,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.attention_dropout,
        type_vocab_size=max(shape.num_token_types, 1),  # the library has at least one
        attn_implementation="eager",
        **settings,
    )
