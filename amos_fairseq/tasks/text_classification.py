"""Fine-tuning on texts, or pairs of texts, with a class, several labels, or a number."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from fairseq.tasks import register_task
from omegaconf import MISSING

from amos_fairseq.data.labeled_texts import LabeledTexts, read_task_record
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import TOKENIZER_DIRECTORY
from amos_fairseq.models.fine_tuning import TEXT_HEAD, FineTunedModel
from amos_fairseq.tasks.corpus_task import LabeledTask, LabeledTaskConfig, prepared_directory

logger = logging.getLogger(__name__)


@dataclass
class TextClassificationConfig(LabeledTaskConfig):
    data: str = field(
        default=MISSING, metadata={"help": "directory with task.json, of amos classify or amos prepare glue"}
    )
    tokens_per_text: int = field(
        default=512,
        metadata={
            "range": "1 or more",
            "help": "tokens of a row with special tokens; longer ones are cut, of a pair the longer text first",
        },
    )
    separator_token: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={"help": "2 for a second </s> between the texts of a pair (default: one </s>)"},
    )


@register_task("text_classification", dataclass=TextClassificationConfig)
class TextClassificationTask(LabeledTask):
    """Every row is an example; rows beyond the model's length are cut and counted."""

    cfg: TextClassificationConfig
    length = "tokens_per_text"
    head_for = "texts"

    def __init__(self, cfg: Any, vocabulary: Vocabulary, dictionary: Any, record: dict[str, Any]) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        self.record = record

    @classmethod
    def setup_task(cls, cfg: TextClassificationConfig, **kwargs: Any) -> "TextClassificationTask":
        """Read vocabulary and ``task.json``; raise :class:`UserError` for a directory or settings that cannot be used."""
        directory = prepared_directory(cfg, "glue")
        record = read_task_record(directory, "give a directory with task.json, of amos classify or amos prepare glue")
        # GLUE's tasks share one tokenizer.
        tokenizers = [folder / TOKENIZER_DIRECTORY for folder in (directory, directory.absolute().parent)]
        tokenizer = next((str(folder) for folder in tokenizers if folder.is_dir()), None)
        vocabulary = Vocabulary.of_corpus([directory / "input0"], tokenizer)
        dictionary = vocabulary.load_dictionary()
        if cfg.separator_token not in (None, dictionary.eos()):
            raise UserError(
                f"--separator-token {cfg.separator_token} is not </s>: give {dictionary.eos()}, or leave it out"
            )
        return cls(cfg, vocabulary, dictionary, record)

    def add_head(self, model: FineTunedModel) -> None:
        scale = None
        if "deviation" in self.record:
            scale = self.record["mean"], self.record["deviation"]
        model.register_classification_head(TEXT_HEAD, self.record["num_classes"], scale)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the rows of ``split``; raise :class:`UserError` if its files are missing."""
        dataset = LabeledTexts(
            Path(self.cfg.data),
            split,
            self.record,
            self.dictionary,
            self.cfg.tokens_per_text,
            self.cfg.separator_token,
            seed=self.cfg.seed,
            training=split == self.cfg.train_subset,
        )
        cut = f"; {dataset.num_cut:,} of more than {dataset.max_tokens} tokens are cut" if dataset.num_cut else ""
        logger.info(f"{dataset.source}: {len(dataset):,} rows{cut}")
        self.datasets[split] = dataset
