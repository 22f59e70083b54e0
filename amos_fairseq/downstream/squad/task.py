"""Fine-tuning on SQuAD, where the answer is a span of the context or, in version 2.0, absent: fairseq's task and criterion."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import MISSING
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from amos_fairseq.criterions.pretraining import mean
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.labeled_task import LabeledCriterion, LabeledTask, LabeledTaskConfig, prepared_directories
from amos_fairseq.downstream.squad.dataset import SquadSplit, SquadWindowDataset, WindowLimits, read_squad_manifest
from amos_fairseq.downstream.squad.model import SPAN_HEADS, SpanModel, SpanOutput
from amos_fairseq.errors import UserError
from amos_fairseq.setting_checks import setting

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
    """Every window of every context is a training example.

    ``amos squad`` decodes answers and scores them; validation here measures the loss and the accuracy of positions.
    """

    cfg: SquadConfig
    length = "tokens_per_window"
    model_class = SpanModel
    head_for = "answers"

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs: Any) -> "SquadTask":
        (directory,) = prepared_directories(cfg, "squad", several=False)
        read_squad_manifest(directory)
        vocabulary = Vocabulary.of_corpus([directory], None)
        dictionary = vocabulary.load_dictionary()
        if cfg.separator_token not in (None, dictionary.eos()):
            raise UserError(f"--separator-token {cfg.separator_token} is not </s>: give {dictionary.eos()}, or none")
        return cls(cfg, vocabulary, dictionary)

    def add_head(self, model: SpanModel) -> None:
        model.register_span_head(str(self.cfg.span_head))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        cfg, data = self.cfg, SquadSplit(Path(self.cfg.data), split)
        num_separators = 1 if cfg.separator_token is None else 2
        limits = WindowLimits(cfg.tokens_per_window, cfg.doc_stride, cfg.max_question_length, num_separators)
        training = split == cfg.train_subset
        dataset = SquadWindowDataset(data, self.dictionary, limits=limits, seed=cfg.seed, training=training)
        longest = dataset.sizes.max()
        logger.info(f"{dataset.source}: {len(data)} questions, {len(dataset)} windows of up to {longest} tokens")
        self.datasets[split] = dataset


@dataclass
class SquadCriterionConfig(FairseqDataclass):
    answerable_loss_weight: float = setting(
        0.5, "weight of the answerability classifier, where the head has one (XLNet: 0.5)", "0 or more"
    )


@register_criterion("squad", dataclass=SquadCriterionConfig)
class SquadCriterion(LabeledCriterion):
    """L = 1/B sum_b [ -1/2 (log p(s_b) + log p(e_b)) + w BCE(u_b, [window b holds no answer]) ], nats.

    s and e are the answer's first and last position, both 0 (``<s>``) in a window without it; p is a softmax over the
    context tokens and ``<s>``; the joint head predicts the end given the true start. u is the joint head's classifier; the
    independent head has no such term. B is the number of windows in a batch; fairseq divides by that of an update.

    Departure: ELECTRA's released code gives the classifier one label per question; here it is one per window, as in XLNet.
    """

    def __init__(self, task, answerable_loss_weight: float):
        super().__init__(task)
        self.answerable_loss_weight = answerable_loss_weight

    def forward(self, model, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss (float32 scalar), the number of windows, and the sums to log."""
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
            loss = loss + self.answerable_loss_weight * answerable_loss
            logging_output["answerable_loss"] = answerable_loss.detach()
            logging_output["answerable_acc"] = (output.unanswerable_logits > 0).eq(unanswerable).sum()
        return loss, num_windows, logging_output | {"loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over the windows of all ranks and accumulated batches."""
        totals = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
        count = float(totals["sample_size"])
        for key in totals:
            if key not in ("ntokens", "nsentences", "sample_size"):
                metrics.log_scalar(key, mean(totals[key], count), count, round=4)
