"""Fine-tuning on SQuAD: the answer is a span of the context, or, in version 2.0, absent."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from omegaconf import MISSING

from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.labeled_task import LabeledTask, LabeledTaskConfig, prepared_directories
from amos_fairseq.downstream.squad.dataset import SquadSplit, SquadWindowDataset, WindowLimits, read_squad_manifest
from amos_fairseq.downstream.squad.model import SPAN_HEADS, SpanModel
from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)


@dataclass
class SquadConfig(LabeledTaskConfig):
    data: str = field(default=MISSING, metadata={"help": "directory that amos prepare squad wrote"})
    span_head: ChoiceEnum(list(SPAN_HEADS)) = field(
        default="independent",
        metadata={"help": "start and end independently (AMOS), or XLNet's joint head (ELECTRA, thesis 5.2.4)"},
    )
    tokens_per_window: int = field(
        default=512,
        metadata={
            "range": "1 or more",
            "help": "tokens of question, context and special tokens (AMOS Appendix B: 512)",
        },
    )
    doc_stride: int = field(
        default=128,
        metadata={"range": "1 or more", "help": "distance in tokens between the windows of a longer context (BERT's)"},
    )
    max_question_length: int = field(
        default=64, metadata={"range": "1 or more", "help": "tokens of a question; the rest is cut off (BERT's)"}
    )
    separator_token: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "id of </s> for a second </s> before the context, as in the released AMOS script (default: none)"
        },
    )


@register_task("squad", dataclass=SquadConfig)
class SquadTask(LabeledTask):
    """Every window of every context is a training example (see ``data.squad``).

    ``amos squad`` decodes answers and scores them; validation here measures the loss and the accuracy of positions.
    """

    cfg: SquadConfig
    length = "tokens_per_window"
    model_class = SpanModel
    head_for = "answers"

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs: Any) -> "SquadTask":
        """Read the vocabulary; raise :class:`UserError` for a directory or lengths that cannot be used."""
        (directory,) = prepared_directories(cfg, "squad", several=False)
        window_limits(cfg).check()
        read_squad_manifest(directory)
        vocabulary = Vocabulary.of_corpus([directory], None)
        dictionary = vocabulary.load_dictionary()
        if cfg.separator_token not in (None, dictionary.eos()):
            raise UserError(
                f"--separator-token {cfg.separator_token} is not </s>: give {dictionary.eos()}, or leave it out"
            )
        return cls(cfg, vocabulary, dictionary)

    def add_head(self, model: SpanModel) -> None:
        model.register_span_head(str(self.cfg.span_head))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the windows of ``split``; raise :class:`UserError` if its files are missing."""
        data = SquadSplit(Path(self.cfg.data), split)
        dataset = SquadWindowDataset(
            data,
            self.dictionary,
            limits=window_limits(self.cfg),
            seed=self.cfg.seed,
            training=split == self.cfg.train_subset,
        )
        logger.info(
            f"{dataset.source}: {len(data)} questions, {len(dataset)} windows of up to {dataset.sizes.max()} tokens"
        )
        self.datasets[split] = dataset


def window_limits(cfg: SquadConfig) -> WindowLimits:
    num_separators = 1 if cfg.separator_token is None else 2
    return WindowLimits(cfg.tokens_per_window, cfg.doc_stride, cfg.max_question_length, num_separators)
