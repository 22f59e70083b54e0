"""The encoder of any pretraining model, with heads for labelled tasks."""

import logging
import re

from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig, check_encoder, embedding_width, encoder_shape
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.modules.encoder import EncoderShape, TransformerEncoder
from amos_fairseq.modules.heads import ClassificationHead
from amos_fairseq.modules.initialization import initialize, mark_layer_depths, mark_undecayed
from amos_fairseq.modules.span_heads import SPAN_HEADS, SpanOutput, build_span_head

logger = logging.getLogger(__name__)

# Where the kept encoder stands in a pretraining checkpoint (a discriminator, or MLM's only network), and where here.
ENCODER_IN_PRETRAINING = ("discriminator.", "transformer.")
ENCODER = "encoder."
EMBEDDING = "embed_tokens."
HEADS = ("classification_heads.", "span_head.")


class FineTunedModel(BaseFairseqModel):
    """What a task other than pretraining gets from every architecture: token embeddings, encoder, and its own head.

    Loads the encoder out of a pretraining checkpoint, or a checkpoint that was fine-tuned already, whose head is kept where
    it has the shape of this task's.
    """

    def __init__(self, cfg: EncoderConfig, rows: EmbeddingRows):
        super().__init__()
        check_encoder(cfg)
        self.cfg = cfg
        self.rows = rows
        self.end_of_text = rows.end
        self.embed_tokens = nn.Embedding(rows.num_rows, embedding_width(cfg), padding_idx=rows.pad)
        self.encoder = TransformerEncoder(self.kept_shape(cfg))
        self.classification_heads = nn.ModuleDict()
        self.span_head: nn.Module | None = None
        self._prepare(self)
        mark_layer_depths(self)

    @staticmethod
    def kept_shape(cfg: EncoderConfig) -> EncoderShape:
        """The shape of the encoder that pretraining leaves."""
        return encoder_shape(cfg)

    def _prepare(self, part: nn.Module) -> None:
        initialize(part, self.cfg.init_std, self.cfg.linear_init_std)
        mark_undecayed(part, also=("relative_position",))

    def register_classification_head(self, name: str, num_classes: int) -> None:
        """A head for ``num_classes`` classes, or for regression (1); called by fairseq's ``sentence_prediction``."""
        head = ClassificationHead(
            self.cfg.encoder_embed_dim, num_classes, str(self.cfg.pooler_activation_fn), self.cfg.pooler_dropout
        )
        self._prepare(head)
        self.classification_heads[name] = head
        mark_layer_depths(self)

    def register_span_head(self, kind: str) -> None:
        """A head that marks answers: one of ``modules.span_heads.SPAN_HEADS``."""
        cfg = self.cfg
        self.span_head = build_span_head(kind, cfg.encoder_embed_dim, cfg.pooler_dropout, cfg.layer_norm_eps)
        self._prepare(self.span_head)
        mark_layer_depths(self)

    @staticmethod
    def wrote(state_dict: dict[str, Tensor]) -> bool:
        """Whether these weights are of a fine-tuned model, not of a pretraining one."""
        return any(key.startswith(ENCODER) for key in state_dict)

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        """Make room for the heads that a fine-tuned checkpoint holds."""
        for key, value in state_dict.items():
            found = re.fullmatch(r"classification_heads\.(.+)\.output\.weight", key)
            if found:
                self.register_classification_head(found.group(1), num_classes=value.size(0))
        if any(key.startswith("span_head.") for key in state_dict):
            independent, joint = SPAN_HEADS
            self.register_span_head(joint if "span_head.start.weight" in state_dict else independent)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        features_only: bool = True,
        classification_head_name: str | None = None,
        answer_mask: Tensor | None = None,
        span_targets: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None] | SpanOutput:
        """Tokens [B,T] int64 -> the head's logits [B, classes], or without a head's name the last states [B,T,D].

        With ``answer_mask`` ([B,T] bool, True at tokens of which an answer may consist) what the span head makes of the
        states; ``span_targets`` as there. The other arguments, and the second value, are those of fairseq's own encoders.
        """
        states = self.extract_features(src_tokens)
        if answer_mask is not None:
            return self.span_head(states, answer_mask, span_targets)
        if classification_head_name is not None:
            return self.classification_heads[classification_head_name](states), None
        return states, None

    def extract_features(self, tokens: Tensor) -> Tensor:
        """Hidden states of the last layer: [B,T] int64 -> [B,T,D]."""
        padding_mask = tokens.eq(self.rows.pad)
        return self.encoder(self.embed_tokens(tokens), padding_mask, token_types=self.token_types(tokens))[-1]

    def token_types(self, tokens: Tensor) -> Tensor | None:
        """[B,T] int64: 0 in the first text, its ``</s>`` included, 1 in the second; None if the encoder has no types."""
        if self.cfg.token_types == 0:
            return None
        ends = tokens.eq(self.end_of_text).long()
        return (ends.cumsum(1) - ends).clamp(max=self.cfg.token_types - 1)

    def max_positions(self) -> int:
        return self.cfg.max_positions

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Make of a checkpoint's weights those of this model, in place.

        Raises:
            UserError: its encoder has another shape.
        """
        self.take_encoder(state_dict)
        here = self.state_dict()
        self._check_shapes(state_dict, here)
        unused = [key for key in state_dict if key.startswith(HEADS) and not same_shape(key, state_dict, here)]
        for key in unused:
            del state_dict[key]
        fresh = [key for key in here if key.startswith(HEADS) and key not in state_dict]
        state_dict.update({key: here[key] for key in fresh})
        if unused:
            logger.info(
                f"of the checkpoint's heads these do not fit this task and are left behind: {', '.join(unused)}"
            )
        if fresh:
            logger.info(f"the checkpoint has no head for this task; these start from random values: {', '.join(fresh)}")

    def take_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Rename a pretraining model's encoder; its generator and heads are left behind."""
        if not any(key.startswith(ENCODER_IN_PRETRAINING) for key in state_dict):
            return
        dropped = set()
        for key in list(state_dict):
            if key.startswith(ENCODER_IN_PRETRAINING):
                state_dict[ENCODER + key.partition(".")[2]] = state_dict.pop(key)
            elif not key.startswith(EMBEDDING):
                dropped.add(key.partition(".")[0])
                del state_dict[key]
        logger.info(
            f"fine-tuning takes the encoder of a pretraining checkpoint; left behind: {', '.join(sorted(dropped))}"
        )

    @staticmethod
    def _check_shapes(state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        for key in sorted(here.keys() | state_dict.keys()):
            if key.startswith(HEADS):
                continue
            if not same_shape(key, state_dict, here):
                there, wanted = (tuple(side[key].shape) if key in side else "absent" for side in (state_dict, here))
                raise UserError(
                    f"the checkpoint holds another encoder than the flags describe: {key} is {there} in the checkpoint, "
                    f"{wanted} here; {_advice(key, there, wanted)}"
                )


def same_shape(key: str, *sides: dict[str, Tensor]) -> bool:
    """Whether all sides hold a tensor of this name, of one shape."""
    return all(key in side for side in sides) and len({side[key].shape for side in sides}) == 1


def _advice(key: str, there: tuple[int, ...] | str, wanted: tuple[int, ...] | str) -> str:
    if there[-1] == wanted[-1]:  # of one width
        if "embed_positions" in key:
            return "give the checkpoint's --max-positions"
        if key.startswith(EMBEDDING):
            return "binarize the task with the tokenizer of the checkpoint (SAVE_DIR/tokenizer)"
    if "relative_position" in key:
        return "give the checkpoint's --relative-position-scheme and its sizes"
    return "give the checkpoint's --arch and sizes"
