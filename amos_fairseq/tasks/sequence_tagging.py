"""Fine-tuning on sequence tagging: one label a word, such as parts of speech, chunks and named entities."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.tasks import register_task
from omegaconf import MISSING

from amos_fairseq.data.tagging import TaggedSentences, read_tagging_manifest, write_labels
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.tasks.corpus_task import LabeledTask, LabeledTaskConfig, prepared_directory

logger = logging.getLogger(__name__)


@dataclass
class SequenceTaggingConfig(LabeledTaskConfig):
    data: str = field(default=MISSING, metadata={"help": "directory that amos prepare tagging wrote"})
    tokens_per_sentence: int = field(
        default=512,
        metadata={
            "range": "1 or more",
            "help": "tokens of a sentence with <s> and </s>; longer ones are cut at a word boundary",
        },
    )


@register_task("sequence_tagging", dataclass=SequenceTaggingConfig)
class SequenceTaggingTask(LabeledTask):
    """Every sentence is an example; words beyond the model's length are cut, counted and, in validation, wrong."""

    cfg: SequenceTaggingConfig
    length = "tokens_per_sentence"
    head_for = "labels"
    data_set: type[TaggedSentences] = TaggedSentences

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, labels: list[str], has_spans: bool) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        self.labels, self.has_spans = labels, has_spans

    @classmethod
    def setup_task(cls, cfg: SequenceTaggingConfig, **kwargs: Any) -> "SequenceTaggingTask":
        """Read vocabulary and labels; raise :class:`UserError` for a directory that cannot be used."""
        directory = prepared_directory(cfg, "tagging")
        manifest = read_tagging_manifest(directory)
        vocabulary = Vocabulary.of_corpus([directory], None)
        return cls(cfg, vocabulary, vocabulary.load_dictionary(), manifest["labels"], manifest["has_spans"])

    def add_head(self, model: FineTunedModel) -> None:
        model.register_tagging_head(len(self.labels))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the sentences of ``split``; raise :class:`UserError` if its files are missing."""
        dataset = self.data_set(
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

    def write_vocabulary(self) -> None:
        super().write_vocabulary()
        write_labels(Path(self.cfg.save_dir), self.labels)
