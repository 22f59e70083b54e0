"""A generator that is not trained: the MLM heads of another checkpoint, and the temperature of their samples (Fast-ELECTRA).

Shapes: B sequences, T tokens, M masked positions per sequence, K depths, D width of a network, E width of token embeddings,
V padded vocabulary size.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from omegaconf import II
from torch import Tensor, nn
from torch.nn.functional import pad

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import DetectorWithMlmConfig, PaddedVocabulary
from amos_fairseq.models.pretraining import (
    DELTA,
    EMBEDDING,
    ENCODER,
    ENCODER_IN_PRETRAINING,
    POOLER,
    GeneratorNetwork,
    PretrainingBatch,
    PretrainingModel,
    describe_mismatch,
    same_shape,
)
from amos_fairseq.modules.heads import MlmHead
from amos_fairseq.setting_checks import setting

logger = logging.getLogger(__name__)

FROZEN = "--generator-checkpoint, whose generator is not trained"
NETWORK, HEADS = "discriminator.", ("detection_head.", "token_prediction.")


@dataclass
class ReplacementConfig(DetectorWithMlmConfig):
    """A discriminator whose replacement tokens are samples of its own generator, or of a frozen one."""

    generator_checkpoint: str = setting(
        "",
        "checkpoint of this package whose MLM head or heads sample the replacement tokens and are not trained, with the "
        "tokens of this corpus; FILE1:FILE2 are several, for amos (default: a generator that is trained)",
    )
    generator_temperature: float = setting(
        1.0, "sample with the generator's probabilities to the power 1 / temperature", "above 0"
    )
    generator_temperature_start: float = setting(
        0.0, "temperature of the first update, which falls to --generator-temperature; 0: no schedule", "0 or more"
    )
    generator_temperature_decay: float = setting(
        0.1, "share of the planned updates in which the rest of that fall becomes 1/e of what it was", "above 0"
    )
    max_update: int = II("optimization.max_update")


class FrozenGenerator(nn.Module):
    """Networks with MLM heads that predict the masked tokens, K depths in all, and that no update changes.

    Checkpoints of different widths are one generator for the output layer and the mixture: with E = [E_1 ... E_n] and h^(d)
    in the columns of its own E_i, zeros elsewhere, E h^(d) is E_i h^(d). The same holds for v and the features f^(d).

    Args:
        networks: those of one checkpoint have the same ``embedding``.
    """

    def __init__(self, networks: Sequence[GeneratorNetwork]):
        super().__init__()
        width_of = {network.embedding: network.encoder.shape.width for network in networks}
        tables = list(width_of)  # E_1 to E_n
        self.widths = list(width_of.values())
        self.embedding_widths = [table.embedding_dim for table in tables]
        self.table_of = [tables.index(network.embedding) for network in networks]
        self.inputs = nn.ModuleList(network.embedding for network in networks)
        self.encoders = nn.ModuleList(network.encoder for network in networks)
        self.heads = nn.ModuleList(nn.ModuleList(network.heads.values()) for network in networks)
        self.depths = [list(network.heads) for network in networks]
        self.embedding = tables[0]
        if len(tables) > 1:
            self.embedding = nn.Embedding.from_pretrained(torch.cat([table.weight.data for table in tables], dim=1))
        self.requires_grad_(False)
        self.eval()

    @property
    def all_heads(self) -> list[MlmHead]:
        """The MLM head of each depth."""
        return [head for heads in self.heads for head in heads]

    def forward(self, batch: PretrainingBatch, padding_mask: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the features f^(d) and outputs h^(d) of each depth at the masked positions.

        K tensors [B,M,D] and K of [B,M,E], where D and E are the sums over the checkpoints.
        """
        features, hidden, positions = [], [], batch.masked_positions
        for inputs, encoder, heads, depths, table in zip(
            self.inputs, self.encoders, self.heads, self.depths, self.table_of, strict=True
        ):
            layers = encoder(inputs(batch.masked_tokens), padding_mask, last_positions=positions)
            states = [layers.at(depth - 1, positions) for depth in depths[:-1]] + [layers[-1]]
            outputs = [head(f) for head, f in zip(heads, states, strict=True)]
            features += [in_columns(f, self.widths, table) for f in states]
            hidden += [in_columns(h, self.embedding_widths, table) for h in outputs]
        return features, hidden

    def train(self, mode: bool = True) -> "FrozenGenerator":
        """Stay in eval mode: without dropout, q is one distribution."""
        return super().train(False)


def refuse_settings(cfg: ReplacementConfig, names: Sequence[str], reason: str) -> None:
    """Raise ValueError if one of these settings, which have no meaning for the ``reason``, is not at its default."""
    for name in names:
        if getattr(cfg, name) not in (False, 0, "", "embeddings"):
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with {reason}: leave it out")


def in_columns(values: Tensor, widths: Sequence[int], index: int) -> Tensor:
    """Put ``values`` [..., widths[index]] into their columns of zeros: [..., sum of the widths]."""
    return pad(values, (sum(widths[:index]), sum(widths[index + 1 :]))) if len(widths) > 1 else values


class ReplacementModel(PretrainingModel):
    """A discriminator with a generator of its own, or with a frozen one, which is no part of its state.

    Attributes:
        load_generator: reads ``--generator-checkpoint``: before training, and otherwise when the generator is first needed, so
            that fine-tuning and export need no file.
    """

    load_generator: Callable[[], list[GeneratorNetwork]]
    discriminator: nn.Module

    def __init__(self, cfg: ReplacementConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        if cfg.generator_temperature_start and cfg.max_update <= 0:
            raise ValueError("--generator-temperature-start needs --max-update: it falls over the planned updates")
        self.num_updates = 0
        # In a tuple it is no submodule: neither in the state of the model nor among its parameters.
        self._frozen: tuple[FrozenGenerator, ...] = ()
        self.newly_initialized: list[str] = []  # weights that a loaded checkpoint does not have

    @property
    def frozen_generator(self) -> FrozenGenerator | None:
        """The frozen generator; None if the model trains its own."""
        if self.cfg.generator_checkpoint and not self._frozen:
            self.read_generator()
        return self._frozen[0] if self._frozen else None

    def read_generator(self) -> None:
        networks = self.choose_networks(self.load_generator())
        self._frozen = (FrozenGenerator(networks).to(self.embed_tokens.weight),)

    def choose_networks(self, networks: list[GeneratorNetwork]) -> list[GeneratorNetwork]:
        """Return the networks of the checkpoints that this model uses."""
        return networks

    def generator_networks(self) -> list[GeneratorNetwork]:
        return [] if self.cfg.generator_checkpoint else super().generator_networks()

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """Move and cast the frozen generator with the model."""
        for generator in self._frozen:
            generator._apply(fn)
        return super()._apply(fn, recurse)

    @property
    def generator_embedding(self) -> nn.Embedding:
        return self.embed_tokens if self.frozen_generator is None else self.frozen_generator.embedding

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    @property
    def temperature(self) -> float:
        """The sampling temperature T(u) = T_1 + (T_0 - T_1) exp(-u / tau), u the share of the planned updates that is done.

        ``--generator-temperature-start`` is T_0, ``--generator-temperature`` T_1, ``--generator-temperature-decay`` tau. The
        form is after Fast-ELECTRA (Dong et al., ICLR 2024); values are ours, not compared with the paper's.
        """
        last, first = self.cfg.generator_temperature, self.cfg.generator_temperature_start
        if not first:
            return last
        done = self.num_updates / self.cfg.max_update
        return last + (first - last) * math.exp(-done / self.cfg.generator_temperature_decay)

    @property
    def logged_temperature(self) -> float | None:
        """The temperature, None where it is always 1."""
        cfg = self.cfg
        is_set = cfg.generator_checkpoint or cfg.generator_temperature_start or cfg.generator_temperature != 1
        return self.temperature if is_set else None

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Prepare weights to be loaded; with a frozen generator, any encoder of this package starts the discriminator."""
        super().upgrade_state_dict_named(state_dict, name)
        if not self.cfg.generator_checkpoint:
            return
        here = self.state_dict()
        if not all(same_shape(key, state_dict, here) for key in here.keys() | state_dict.keys()):
            self.start_from(state_dict, here)

    def start_from(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Turn the weights of another model, in place, into those of this one: its encoder, embeddings and detection head.

        What it lacks keeps the initial values of this model, ``here``.
        """
        if DELTA in state_dict:
            state_dict[f"{EMBEDDING}weight"] = state_dict[f"{EMBEDDING}weight"] + state_dict.pop(DELTA)
        for key in list(state_dict):
            if key.startswith((*ENCODER_IN_PRETRAINING, ENCODER)):
                state_dict[NETWORK + key.partition(".")[2]] = state_dict.pop(key)
        encoder_keys = sorted(key for key in here.keys() | state_dict.keys() if key.startswith((NETWORK, EMBEDDING)))
        for key in encoder_keys:
            if not same_shape(key, here, state_dict):
                raise UserError(
                    "the checkpoint holds another encoder than the flags describe: "
                    f"{describe_mismatch(key, state_dict, here)}; give its vocabulary, sizes and --relative-position-scheme"
                )
        taken = set(encoder_keys) | (state_dict.keys() & POOLER.keys())
        for head in HEADS:
            head_keys = {key for key in here.keys() | state_dict.keys() if key.startswith(head)}
            if all(same_shape(key, here, state_dict) for key in head_keys):
                taken |= head_keys
        self.newly_initialized = [key for key in here if key not in taken]
        sides = (("not used", state_dict.keys() - taken), ("newly initialized", self.newly_initialized))
        parts = (
            f"{side}: {', '.join(sorted({key.partition('.')[0] for key in keys}))}" for side, keys in sides if keys
        )
        logger.info("; ".join(["the discriminator starts from the encoder of a checkpoint", *parts]))
        for key in state_dict.keys() - taken:
            del state_dict[key]
        state_dict.update({key: here[key] for key in self.newly_initialized})
