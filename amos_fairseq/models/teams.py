"""TEAMS: ELECTRA augmented with multi-word selection (Shen et al., 2021), section 3.

Shapes: B sequences, T tokens, M masked positions per sequence, K negatives per masked position, D width of the encoder,
E width of the token embeddings, V padded vocabulary size.
"""

from dataclasses import dataclass

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.sampling import (
    ReplacementAndNegativeSampler,
    ReplacementSampler,
    forbid_tokens,
    gumbel_max,
    gumbel_noise,
    gumbel_top_k,
)
from amos_fairseq.models.configuration import (
    DEBERTA_MINI,
    MINI,
    MODERN,
    MODERN_MINI,
    DetectorConfig,
    PaddedVocabulary,
    embedding_width,
    has_biases,
    make_detection_head,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.pretraining import PretrainedEncoder, PretrainingBatch, PretrainingOutput, SingleMlmModel
from amos_fairseq.modules.encoder import LayerOutputs, TransformerConfig, TransformerEncoder, share_bottom, with_layers
from amos_fairseq.modules.heads import DetectionHead, EmbeddingHead, FeedForwardHead
from amos_fairseq.setting_checks import setting

# Prefixes of weights that a checkpoint has only if it was trained with the task.
HEAD_OF_TASK = {"mws": "mws_head.", "rtd": "detection_head."}
LAYERS, RTD_LAYER = "discriminator.layers.", "rtd_layer."


@dataclass
class TeamsConfig(DetectorConfig):
    """TEAMS-base (section 4.1, Table 5); the ablations of Tables 2 to 4 and Figures 4 and 5 are settings of the same model."""

    generator_layers: int = setting(
        0, "layers of the generator, as wide as the encoder's; 0: half as many as the encoder's", "0 or more"
    )
    share_layers: ChoiceEnum(["none", "half", "all"]) = setting(
        "half", "how many of the generator's layers are the encoder's own, from the bottom (Table 4)"
    )
    negative_samples: int = setting(
        5, "K, other tokens among which the original is to be selected (TEAMS section 4.1)", "1 or more"
    )
    negative_sampling: ChoiceEnum(["sampled", "hardest"]) = setting(
        "sampled", "sampled from the generator's softmax without replacement, or its K most likely (Figure 5)"
    )
    task_heads: ChoiceEnum(["attention", "extra_layer", "ffn"]) = setting(
        "attention",
        "one branch per task: the last layer and another one beside it; two layers on top of all layers; or a "
        "feed-forward network per token on top of all layers (Table 3)",
    )
    rtd_loss_weight: float = setting(
        5.0, "lambda_1, weight of replaced token detection; 0 leaves its branch out (Table 2)", "0 or more"
    )
    mws_loss_weight: float = setting(
        2.0, "lambda_2, weight of multi-word selection; 0 leaves its branch out (Table 2)", "0 or more"
    )
    representation: ChoiceEnum(["mws", "rtd"]) = setting(
        "mws", "the branch that is fine-tuned, exported and loaded (Table 3)"
    )


def discriminator_tasks(cfg: TeamsConfig) -> tuple[str, ...]:
    """Return the discriminator's tasks, "mws" and "rtd": those whose loss has a weight."""
    weights = {"mws": cfg.mws_loss_weight, "rtd": cfg.rtd_loss_weight}
    return tuple(task for task, weight in weights.items() if weight)


def generator_depth(cfg: TeamsConfig) -> int:
    """Return the generator's layers; the default is half of the encoder's (Table 5)."""
    return cfg.generator_layers or cfg.encoder_layers // 2


def num_shared_layers(cfg: TeamsConfig) -> int:
    """Return how many of the generator's bottom layers are the encoder's own; half is rounded down (Table 4)."""
    depth = generator_depth(cfg)
    return {"none": 0, "half": depth // 2, "all": depth}[cfg.share_layers]


class TeamsBranch(PretrainedEncoder):
    """The branch ``--representation`` of a pretraining checkpoint (Table 3)."""

    def config(self) -> TransformerConfig:
        """Return the sizes of either branch: L layers, or L + 1 with a head on top of all L."""
        extra = 1 if self.cfg.task_heads == "extra_layer" else 0
        return transformer_config(self.cfg, self.cfg.encoder_layers + extra)

    def take(self, state_dict: dict[str, Tensor]) -> None:
        select_branch(state_dict, self.cfg.representation)
        super().take(state_dict)


def select_branch(state_dict: dict[str, Tensor], representation: str) -> None:
    """Make one branch, "mws" or "rtd", the discriminator of a pretraining checkpoint, in place."""
    layers = {int(key.removeprefix(LAYERS).partition(".")[0]) for key in state_dict if key.startswith(LAYERS)}
    if not layers:  # already fine-tuned
        return
    present = [task for task, head in HEAD_OF_TASK.items() if any(key.startswith(head) for key in state_dict)]
    rtd_keys = [key for key in state_dict if key.startswith(RTD_LAYER)]
    is_own_layer = representation == "rtd" and len(present) == 2
    if representation not in present or (is_own_layer and not rtd_keys):
        raise UserError(
            f"the checkpoint has no branch {representation} of its own (it was trained without that task, or with --task-heads "
            f"ffn): give --representation {present[0] if present else 'of a TEAMS checkpoint'}"
        )
    if not is_own_layer:
        return
    for key in rtd_keys:
        state_dict[f"{LAYERS}{max(layers)}.{key.removeprefix(RTD_LAYER)}"] = state_dict.pop(key)


@dataclass(frozen=True)
class TeamsOutput(PretrainingOutput):
    """What multi-word selection adds."""

    candidates: Tensor | None = None  # [B,M,1+K] int64, the original first
    mws_logits: Tensor | None = None  # [B,M,1+K] float32, of each candidate


@register_model("teams", dataclass=TeamsConfig)
class TeamsModel(SingleMlmModel):
    """A generator half as deep as the discriminator, whose bottom layers it shares, and a discriminator with two tasks.

    The discriminator's last layer belongs to multi-word selection; replaced tokens are detected on another layer beside it
    (section 3.2). Generator and discriminator share everything below the first layer (token and position embeddings, token
    types, their LayerNorm and projection) and the table of relative positions.
    """

    pretrained_encoder = TeamsBranch

    def __init__(self, cfg: TeamsConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        check_settings(cfg, num_samplable=vocabulary.num_tokens - len(vocabulary.special))
        self.tasks = discriminator_tasks(cfg)
        config, width = TeamsBranch(cfg).config(), cfg.encoder_embed_dim
        self.discriminator = config.build()
        self.generator = transformer_config(cfg, generator_depth(cfg)).build()
        share_bottom(self.generator, self.discriminator, num_shared_layers(cfg))
        self.mlm_head = self.make_mlm_head(width)
        self.mws_head = None
        if "mws" in self.tasks:
            self.mws_head = EmbeddingHead(width, embedding_width(cfg), cfg.layer_norm_eps, has_biases(cfg))
        self.detection_head = make_detection_head(cfg, DetectionHead) if "rtd" in self.tasks else None
        self.rtd_layer = self.mws_ffn = self.rtd_ffn = None
        if len(self.tasks) == 2 and cfg.task_heads == "ffn":
            self.mws_ffn, self.rtd_ffn = FeedForwardHead(config), FeedForwardHead(config)
        elif len(self.tasks) == 2:
            self.rtd_layer = self.discriminator.new_layer(config.num_layers)
        self.initialize()

    @property
    def encoder(self) -> TransformerEncoder:
        """The branch that ``--representation`` names, its last layer included."""
        return self.detection_encoder if self.cfg.representation == "rtd" else self.discriminator

    @property
    def detection_encoder(self) -> TransformerEncoder:
        """The encoder whose states are the input of detection, with its own last layer where it has one."""
        if self.rtd_layer is None:
            return self.discriminator
        return with_layers(self.discriminator, [*self.discriminator.layers[:-1], self.rtd_layer])

    @property
    def mlm_encoder(self) -> TransformerEncoder:
        return self.generator

    def forward(self, batch: PretrainingBatch) -> TeamsOutput:
        """Predict the masked tokens, sample, corrupt, sample candidates, detect, select.

        P_D(x_i^R = x_i) = sigmoid(w . h_RTD(x^R)_i) (TEAMS Eq. 3 and 6) is sigmoid(-rtd_logits): the logits are positive for
        "replaced".
        """
        positions = batch.masked_positions
        nll, correct, sampled, candidates = self.predict_and_sample(self.generate(batch), batch.originals)
        corrupted = replace_positions(batch.tokens, positions, sampled, batch.masked_weights)
        mws_states, rtd_states = self.discriminate(corrupted, self.padding_mask(batch), positions)
        return TeamsOutput(
            mlm_nll=nll,
            mlm_correct=correct,
            sampled_tokens=sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(batch.tokens),
            rtd_logits=self.detection_head(rtd_states) if "rtd" in self.tasks else None,
            candidates=candidates,
            mws_logits=self.select(mws_states, candidates) if "mws" in self.tasks else None,
            rtd_states=rtd_states if "rtd" in self.tasks else None,
        )

    def predict_and_sample(self, hidden: Tensor, originals: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute what ``mlm_loss`` returns, both [B,M], and then what ``sample`` returns, from the same logits."""
        if not self.is_fast:
            return *self.mlm_loss(hidden, self.mlm_head.bias, originals), *self.sample(hidden, originals)
        sampler = ReplacementSampler()
        if "mws" in self.tasks:
            is_hardest = self.cfg.negative_sampling == "hardest"
            sampler = ReplacementAndNegativeSampler(originals.flatten(), self.cfg.negative_samples, is_hardest)
        nll, correct, (sampled, *negatives) = self.mlm_loss_and_sample(hidden, self.mlm_head.bias, originals, sampler)
        candidates = torch.cat([originals.unsqueeze(-1), *negatives], dim=-1) if negatives else None
        return nll, correct, sampled, candidates

    @torch.no_grad()
    def sample(self, hidden: Tensor, originals: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sample replacement tokens and candidates from P_G (TEAMS Eq. 2) without special tokens and padding.

        The two are sampled independently: in Figure 1 the replacement token is not a candidate. There is no gradient.

        ``hidden`` [B,M,E] is the output of ``generate`` -> replacement tokens [B,M] int64, and candidates [B,M,1+K] int64:
        the original, then K other tokens; None instead of the candidates without multi-word selection.
        """
        logits = self.sampling_logits(hidden, self.mlm_head.bias)
        sampled = gumbel_max(logits, gumbel_noise(logits))
        if "mws" not in self.tasks:
            return sampled, None
        others = forbid_tokens(logits, originals)
        if self.cfg.negative_sampling == "hardest":
            negatives = others.topk(self.cfg.negative_samples).indices
        else:
            negatives = gumbel_top_k(others, gumbel_noise(others), self.cfg.negative_samples)
        return sampled, torch.cat([originals.unsqueeze(-1), negatives], dim=-1)

    def discriminate(
        self, corrupted: Tensor, padding_mask: Tensor | None, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the states of multi-word selection and of detection, each [B,T,D], from tokens [B,T] int64.

        With a single task both are the same tensor. With ``selected`` [B,M] int64 the states of multi-word selection are
        computed at these positions alone: [B,M,D].
        """
        embeddings = self.encoder_embedding(corrupted)
        if self.rtd_ffn is not None:
            states = self.discriminator(embeddings, padding_mask)[-1]
            mws_states = self.mws_ffn(states)
            mws_states = mws_states if selected is None else gather_positions(mws_states, selected)
            return mws_states, self.rtd_ffn(states)
        last_positions = selected if "mws" in self.tasks else None
        states = self.discriminator(embeddings, padding_mask, last_positions=last_positions)
        if self.rtd_layer is None:
            return states[-1], states[-1]
        context = self.discriminator.attention_context(embeddings, padding_mask)
        rtd_sums = self.discriminator.run_layer(self.rtd_layer, states.sums[-2], context)
        return states[-1], LayerOutputs([rtd_sums], states.final_norm)[-1]

    def select(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Compute the logit e(x') . h_MWS(x^R)_i of every candidate x' in S_i (TEAMS Eq. 5 and 7).

        [B,M,D] states, [B,M,1+K] int64 candidates -> [B,M,1+K] float32.
        """
        hidden = self.mws_head(states)  # [B,M,E]
        return torch.einsum("bme,bmke->bmk", hidden, self.encoder_embedding(candidates)).float()


def check_settings(cfg: TeamsConfig, num_samplable: int) -> None:
    """Raise ValueError for values out of range, and for a setting that another one makes meaningless."""
    present, depth, shared = discriminator_tasks(cfg), generator_depth(cfg), num_shared_layers(cfg)
    has_ffn, is_attention = cfg.task_heads == "ffn", cfg.task_heads == "attention"
    most, branch = num_samplable - 1, cfg.representation  # the original is not a negative
    refused = [
        (not 1 <= cfg.negative_samples <= most, f"--negative-samples {cfg.negative_samples} must be from 1 to {most}"),
        (
            not present,
            "--mws-loss-weight 0 --rtd-loss-weight 0 leaves no task: give a weight, or train --arch mlm_base",
        ),
        (branch not in present, f"--representation {branch} is a branch of weight 0: give {' or '.join(present)}"),
        (len(present) == 1 and not is_attention, f"--task-heads {cfg.task_heads} has no meaning with a single task"),
        (has_ffn and cfg.encoder == MODERN, f"--task-heads ffn is BERT's, not of --encoder {MODERN}"),
        (
            has_ffn and branch == "rtd",
            "--representation rtd has no meaning with --task-heads ffn, which has one encoder",
        ),
        (cfg.share_layers == "half" and shared == 0, "--share-layers half shares nothing: give --generator-layers 2"),
        (shared > cfg.encoder_layers, f"--generator-layers {depth} shares {shared} layers of {cfg.encoder_layers}"),
        (
            len(present) == 2 and is_attention and cfg.encoder_layers < 2,
            "--task-heads attention needs --encoder-layers 2 or more, as both branches have a last one",
        ),
    ]
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(message)


# Embedding 128 in small: section 4.1 and Table 5. tiny: as many layers as AMOS-tiny's generator, since half of one is none.
register_sizes(
    "teams",
    tiny={"generator_layers": 2, "linear_init_std": 0.1},
    mini={"discriminator_lr_scale": 0.2, **MINI},
    modern_mini=MODERN_MINI,
    deberta_mini=DEBERTA_MINI,
    small={"embedding_dim": 128},
)
