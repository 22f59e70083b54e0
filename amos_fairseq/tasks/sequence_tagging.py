"""Fine-tuning on sequence tagging: one label a word, such as parts of speech, chunks and named entities."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING, OmegaConf

from amos_fairseq.collectives import on_first_rank
from amos_fairseq.data.block_iterator import BlockBatchIterator, blocks_per_batch
from amos_fairseq.data.tagging import TaggedSentences, read_manifest, write_labels
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.tasks.corpus_task import CorpusTask, arch_name

logger = logging.getLogger(__name__)


@dataclass
class SequenceTaggingConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "directory that preprocess/tagging/prepare.sh wrote"})
    tokens_per_sentence: int = field(
        default=512,
        metadata={
            "range": "1 or more",
            "help": "tokens of a sentence with <s> and </s>; longer ones are cut at a word boundary",
        },
    )
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    train_subset: str = II("dataset.train_subset")
    update_freq: list[int] = II("optimization.update_freq")


@register_task("sequence_tagging", dataclass=SequenceTaggingConfig)
class SequenceTaggingTask(CorpusTask):
    """Every sentence is an example; words beyond the model's length are cut, counted and, in validation, wrong."""

    cfg: SequenceTaggingConfig

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, labels: list[str], has_spans: bool) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        self.labels, self.has_spans = labels, has_spans

    @classmethod
    def setup_task(cls, cfg: SequenceTaggingConfig, **kwargs: Any) -> "SequenceTaggingTask":
        """Read vocabulary and labels; raise :class:`UserError` for a directory that cannot be used."""
        if OmegaConf.is_missing(cfg, "data"):
            raise UserError("no data directory is given: give the directory that prepare.sh wrote, as task.data=DIR")
        if not Path(cfg.data).is_dir():
            raise UserError(f"{cfg.data} is not a directory: give the one that preprocess/tagging/prepare.sh wrote")
        manifest = read_manifest(Path(cfg.data))
        vocabulary = Vocabulary.of_corpus([Path(cfg.data)], None)
        return cls(cfg, vocabulary, vocabulary.load_dictionary(), manifest["labels"], manifest["has_spans"])

    @property
    def target_dictionary(self) -> None:
        return None

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, FineTunedModel):
            raise UserError(f"--arch {arch_name(cfg)} has no head for labels: give an architecture of amos_fairseq")
        model.register_tagging_head(len(self.labels))
        return model

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sentence

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the sentences of ``split``; raise :class:`UserError` if its files are missing."""
        dataset = TaggedSentences(
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

    def get_batch_iterator(
        self,
        dataset: TaggedSentences,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **others: Any,
    ) -> BlockBatchIterator:
        """Return batches of ``max_sentences``, or of ``max_tokens`` // ``--tokens-per-sentence`` if that is less.

        Raises:
            UserError: sentences are too long for the model or for a batch.
        """
        batch_size = blocks_per_batch(
            self.cfg.tokens_per_sentence, max_tokens, max_sentences, max_positions, "--tokens-per-sentence"
        )
        return self.batches(dataset, batch_size, partial_update=True, **others)

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Write ``tokenizer`` and ``labels.txt`` into SAVE_DIR before the first checkpoint can be written."""

        def write() -> None:
            self.vocabulary.copy_into(self.cfg.save_dir)
            write_labels(Path(self.cfg.save_dir), self.labels)

        on_first_rank(write)
