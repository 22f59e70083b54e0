"""Fine-tuning on dependency trees (thesis, section 4.2.3)."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.tasks import register_task
from omegaconf import MISSING

from amos_fairseq.data.parsing import ParsedSentences
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.tasks.sequence_tagging import SequenceTaggingConfig, SequenceTaggingTask

logger = logging.getLogger(__name__)


@dataclass
class DependencyParsingConfig(SequenceTaggingConfig):
    data: str = field(default=MISSING, metadata={"help": "OUT/data/parsing of amos parse"})


@register_task("dependency_parsing", dataclass=DependencyParsingConfig)
class DependencyParsingTask(SequenceTaggingTask):
    """Every sentence is an example; its labels are relations. Words beyond the model's length are cut, and in validation
    wrong."""

    head_for = "dependency trees"

    def add_head(self, model: FineTunedModel) -> None:
        model.register_parsing_head(len(self.labels))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the sentences of ``split``; raise :class:`UserError` if its files are missing."""
        dataset = ParsedSentences(
            Path(self.cfg.data),
            split,
            self.dictionary,
            len(self.labels),
            self.cfg.tokens_per_sentence,
            seed=self.cfg.seed,
            training=split == self.cfg.train_subset,
        )
        logger.info(f"{dataset.source}: {dataset.describe()}")
        self.datasets[split] = dataset
