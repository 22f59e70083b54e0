"""SQuAD, where the answer is a span of the context or, in version 2.0, absent: the encoder with a head for spans, and fairseq's
task and criterion.

Shapes: B windows, T tokens, D width, S starts and E ends of the beam, C candidate spans a window. Position 0 (``<s>``)
represents "no answer in this window" and is always allowed; other positions outside of the context are not.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.downstream.labeled_task import (
    LabeledCriterion,
    LabeledTask,
    LabeledTaskConfig,
    log_means,
    open_vocabulary,
    prepared_directories,
)
from amos_fairseq.downstream.model import ExportedHead, FineTunedModel
from amos_fairseq.downstream.spans.dataset import SquadSplit, SquadWindowDataset, WindowLimits
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.configuration import make_transform
from amos_fairseq.models.pretraining import reads_heads
from amos_fairseq.modules.heads import transformed
from amos_fairseq.setting_checks import setting

SPAN_HEADS = ("independent", "joint")
ANSWERABLE_LOSS_WEIGHT = 0.5  # of XLNet


class SpanCandidates(NamedTuple):
    """At inference: the best spans of each window, before order and length are checked."""

    starts: Tensor  # [B,C] int64, token positions
    ends: Tensor  # [B,C] int64
    scores: Tensor  # [B,C] float32, -inf where a position is not an answer token
    null_scores: Tensor  # [B] float32, score of "no answer in this window"; its scale depends on the head


class SpanOutput(NamedTuple):
    """In training."""

    start_logits: Tensor  # [B,T] float32, -inf at positions that are not allowed
    end_logits: Tensor  # [B,T] float32; of the joint head: given the true start
    unanswerable_logits: Tensor | None = None  # [B] float32, positive for "no answer in this window"; of the joint head


class IndependentSpanHead(nn.Module):
    """BERT's head: one linear layer to a start and an end logit per token. "No answer" has the score of the span at ``<s>``.

    The weights are those of ``qa_outputs`` in Hugging Face's question answering models: row 0 start, row 1 end. Those of
    ModernBERT have a ``transform`` before it.
    """

    kind = "independent"
    compares_null = True  # the null score is on the scale of the scores of spans

    def __init__(self, width: int, beam: int = 20, transform: nn.Module | None = None):
        """``beam``: the number of starts, and of ends, that are combined at inference (BERT's n_best_size)."""
        super().__init__()
        self.transform = transform
        self.output = nn.Linear(width, 2)
        self.beam = beam

    def logits(self, states: Tensor) -> Tensor:
        """[B,T,D] -> start and end logits [B,T,2] float32."""
        return self.output(transformed(states, self.transform)).float()

    def forward(
        self, states: Tensor, answer_mask: Tensor, targets: tuple[Tensor, Tensor] | None = None
    ) -> SpanOutput | SpanCandidates:
        """Predict from the last hidden states [B,T,D]. ``answer_mask``: [B,T] bool, True at context tokens; ``targets``: start
        and end, [B] int64 each, 0 where the window has no answer; None at inference."""
        start_logits, end_logits = self.logits(states).unbind(-1)
        if targets is not None:
            allowed = with_null(answer_mask)
            return SpanOutput(masked(start_logits, allowed), masked(end_logits, allowed))
        null_scores = start_logits[:, 0] + end_logits[:, 0]
        start_scores, starts = best(masked(start_logits, answer_mask), self.beam)  # [B,S]
        end_scores, ends = best(masked(end_logits, answer_mask), self.beam)  # [B,E]
        pairs = start_scores.unsqueeze(2) + end_scores.unsqueeze(1)  # [B,S,E]
        starts = starts.unsqueeze(2).expand_as(pairs)
        ends = ends.unsqueeze(1).expand_as(pairs)
        return SpanCandidates(starts.flatten(1), ends.flatten(1), pairs.flatten(1), null_scores)


class JointSpanHead(nn.Module):
    """XLNet's question answering module, which ELECTRA also uses (thesis section 5.2.4).

    The end is scored from its own state and the state of the start: the true start in training, each start of a beam at
    inference. A classifier on ``<s>`` and the expected state of the start predicts whether there is an answer; its logit is
    the null score.

    Departures: Hugging Face's port gives the classifier the true start in training, which reveals the label; here, as in
    XLNet's own code, its input is the start distribution in training too.
    """

    kind = "joint"
    compares_null = False  # the null score is a logit of a classifier

    def __init__(self, width: int, dropout: float, layer_norm_eps: float, num_starts: int = 5, num_ends: int = 5):
        """``num_starts`` x ``num_ends``: the beam (XLNet's start_n_top and end_n_top; ELECTRA uses 20)."""
        super().__init__()
        self.start = nn.Linear(width, 1)
        self.end_dense = nn.Linear(2 * width, width)
        self.end_norm = nn.LayerNorm(width, layer_norm_eps)
        self.end = nn.Linear(width, 1)
        self.answerable_dense = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.answerable = nn.Linear(width, 1, bias=False)
        self.num_starts, self.num_ends = num_starts, num_ends

    def forward(
        self, states: Tensor, answer_mask: Tensor, targets: tuple[Tensor, Tensor] | None = None
    ) -> SpanOutput | SpanCandidates:
        """As ``IndependentSpanHead.forward``; scores of candidates are log p(start) + log p(end | start), nats."""
        allowed = with_null(answer_mask)
        start_logits = masked(self.start(states).squeeze(-1).float(), allowed)  # [B,T]
        unanswerable = self._unanswerable(states, start_logits)
        if targets is not None:
            true_start = gather_positions(states, targets[0].unsqueeze(1))  # [B,1,D]
            end_logits = masked(self._ends(states, true_start).squeeze(1), allowed)
            return SpanOutput(start_logits, end_logits, unanswerable)
        start_scores, starts = best(start_logits.log_softmax(-1), self.num_starts)  # [B,S]
        end_logits = masked(self._ends(states, gather_positions(states, starts)), allowed.unsqueeze(1))  # [B,S,T]
        end_scores, ends = best(end_logits.log_softmax(-1), self.num_ends)  # [B,S,E]
        scores = start_scores.unsqueeze(2) + end_scores
        starts = starts.unsqueeze(2).expand_as(ends)
        no_answer = starts.eq(0) | ends.eq(0)  # "no answer" is scored by the classifier, not by <s>
        scores = scores.masked_fill(no_answer, float("-inf"))
        return SpanCandidates(starts.flatten(1), ends.flatten(1), scores.flatten(1), unanswerable)

    def _ends(self, states: Tensor, starts: Tensor) -> Tensor:
        """Compute end logits from states [B,T,D] and the states of S starts [B,S,D]: [B,S,T] float32."""
        num_starts, length = starts.size(1), states.size(1)
        pairs = torch.cat(
            [states.unsqueeze(1).expand(-1, num_starts, -1, -1), starts.unsqueeze(2).expand(-1, -1, length, -1)], dim=-1
        )  # [B,S,T,2D]
        return self.end(self.end_norm(torch.tanh(self.end_dense(pairs)))).squeeze(-1).float()

    def _unanswerable(self, states: Tensor, start_logits: Tensor) -> Tensor:
        """Compute the logit of "no answer": [B] float32."""
        start_weights = start_logits.softmax(-1).to(states.dtype)  # [B,T]
        expected_start = torch.einsum("bt,btd->bd", start_weights, states)
        summary = torch.tanh(self.answerable_dense(torch.cat([expected_start, states[:, 0]], dim=-1)))
        return self.answerable(self.dropout(summary)).squeeze(-1).float()


@reads_heads("span_head.")
class SpanModel(FineTunedModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refuse_pooling("answer spans")
        self.span_head: nn.Module | None = None

    def exported_head(self, name: str | None) -> ExportedHead | None:
        head = self.span_head
        if not isinstance(head, IndependentSpanHead):
            raise ValueError("a joint head for answers (--span-head joint)")
        # The class does not mask what is no context.
        return ExportedHead("question_answering", head, lambda states, _: head.logits(states), "its head for answers")

    def register_span_head(self, kind: str) -> None:
        cfg = self.cfg
        if kind == IndependentSpanHead.kind:
            self.span_head = IndependentSpanHead(cfg.encoder_embed_dim, transform=make_transform(cfg))
        else:
            self.span_head = JointSpanHead(cfg.encoder_embed_dim, cfg.pooler_dropout, cfg.layer_norm_eps)
        self.initialize(self.span_head)

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        if any(key.startswith("span_head.") for key in state_dict):
            independent, joint = SPAN_HEADS
            self.register_span_head(joint if "span_head.start.weight" in state_dict else independent)

    def forward(
        self,
        src_tokens: Tensor,
        answer_mask: Tensor,
        span_targets: tuple[Tensor, Tensor] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> SpanOutput | SpanCandidates:
        """Predict the answers in windows, of the tokens [B,T] int64: see ``IndependentSpanHead.forward``."""
        return self.span_head(self.extract_features(src_tokens, lengths), answer_mask, span_targets)


def with_null(answer_mask: Tensor) -> Tensor:
    """Add position 0 to the context tokens: [B,T] bool."""
    first = torch.zeros_like(answer_mask)
    first[:, 0] = True
    return answer_mask | first


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    return logits.masked_fill(~allowed, float("-inf"))


def best(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return values and positions of the ``number`` highest scores along the last dimension, or of all if there are fewer."""
    return scores.topk(min(number, scores.size(-1)), dim=-1)


logger = logging.getLogger(__name__)


@dataclass
class SquadConfig(LabeledTaskConfig):
    data: str = setting(MISSING, "directory that amos prepare squad wrote")
    span_head: ChoiceEnum(list(SPAN_HEADS)) = setting(
        "independent", "start and end independently (AMOS), or XLNet's joint head (ELECTRA, thesis 5.2.4)"
    )
    tokens_per_window: int = setting(
        512, "tokens of question, context and special tokens (AMOS Appendix B: 512)", "1 or more"
    )
    doc_stride: int = setting(128, "distance in tokens between the windows of a longer context (BERT's)", "1 or more")
    max_question_length: int = setting(64, "tokens of a question; the rest is cut off (BERT's)", "1 or more")
    separator_token: Optional[int] = setting(  # noqa: UP045
        None, "id of </s> for a second </s> before the context, as in the released AMOS script (default: none)"
    )


@register_task("squad", dataclass=SquadConfig)
class SquadTask(LabeledTask):
    """Every window of every context is a training example. Validation measures the loss and the accuracy of positions; ``amos
    squad`` decodes answers and scores them."""

    cfg: SquadConfig
    length = "tokens_per_window"
    model_class = SpanModel
    head_for = "answers"

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs: Any) -> "SquadTask":
        return cls(cfg, *open_vocabulary(prepared_directories(cfg, several=False), separator=cfg.separator_token))

    def add_head(self, model: SpanModel) -> dict[str, HeadOutputs]:
        model.register_span_head(str(self.cfg.span_head))
        return {}  # its outputs are positions

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        cfg, data = self.cfg, SquadSplit(Path(self.cfg.data), split)
        num_separators = 1 if cfg.separator_token is None else 2
        limits = WindowLimits(cfg.tokens_per_window, cfg.doc_stride, cfg.max_question_length, num_separators)
        dataset = SquadWindowDataset(data, limits=limits, seed=cfg.seed, training=split == cfg.train_subset)
        longest = dataset.sizes.max()
        logger.info(f"{dataset.source}: {len(data)} questions, {len(dataset)} windows of up to {longest} tokens")
        self.datasets[split] = dataset


@register_criterion("squad")
class SquadCriterion(LabeledCriterion):
    """L = 1/B sum_b [ -1/2 (log p(s_b) + log p(e_b)) + 1/2 BCE(u_b, [window b holds no answer]) ], nats.

    s and e are the answer's first and last position, both 0 (``<s>``) in a window without it; p is a softmax over the
    context tokens and ``<s>``; the joint head predicts the end given the true start. u is the joint head's classifier; the
    independent head has no such term. B is the number of windows in a batch; fairseq divides by that of an update.

    Departure: ELECTRA's released code gives the classifier one label per question; here it is one per window, as in XLNet.
    """

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        output: SpanOutput = model(**sample["net_input"])
        starts, ends = sample["net_input"]["span_targets"]  # [B]
        start_loss = cross_entropy(output.start_logits, starts, reduction="sum")
        end_loss = cross_entropy(output.end_logits, ends, reduction="sum")
        loss = (start_loss + end_loss) / 2
        start_correct = output.start_logits.argmax(-1).eq(starts)
        end_correct = output.end_logits.argmax(-1).eq(ends)
        num_windows = sample["nsentences"]
        logging_output = {
            "span_loss": loss.detach(),
            "start_acc": start_correct.sum(),
            "end_acc": end_correct.sum(),
            "span_acc": (start_correct & end_correct).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": num_windows,
            "sample_size": num_windows,
        }
        if output.unanswerable_logits is not None:
            unanswerable = starts.eq(0)
            answerable_loss = binary_cross_entropy_with_logits(
                output.unanswerable_logits, unanswerable.float(), reduction="sum"
            )
            loss = loss + ANSWERABLE_LOSS_WEIGHT * answerable_loss
            logging_output["answerable_loss"] = answerable_loss.detach()
            logging_output["answerable_acc"] = (output.unanswerable_logits > 0).eq(unanswerable).sum()
        return loss, num_windows, logging_output | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the windows of all ranks and accumulated batches."""
        counts = ("ntokens", "nsentences", "sample_size")
        log_means(logging_outputs, *(key for key in logging_outputs[0] if key not in counts))
