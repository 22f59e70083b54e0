"""Fine-tuning on SQuAD: answers are spans of the context, or, in version 2.0, absent."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING, OmegaConf

from amos_fairseq.collectives import on_first_rank
from amos_fairseq.data.block_iterator import BlockBatchIterator, equal_batches, whole_updates
from amos_fairseq.data.squad_dataset import SquadWindowDataset
from amos_fairseq.data.squad_files import SquadSplit, read_manifest
from amos_fairseq.data.squad_windows import WindowLimits
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.modules.span_heads import SPAN_HEADS
from amos_fairseq.tasks.micro_batch_noise import MicroBatchNoise

logger = logging.getLogger(__name__)


@dataclass
class SquadConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "directory that preprocess/squad/prepare.sh wrote"})
    span_head: ChoiceEnum(list(SPAN_HEADS)) = field(
        default="independent",
        metadata={"help": "start and end independently (AMOS), or XLNet's joint head (ELECTRA, thesis 5.2.4)"},
    )
    tokens_per_window: int = field(
        default=512, metadata={"help": "tokens of question, context and special tokens (AMOS Appendix B: 512)"}
    )
    doc_stride: int = field(
        default=128, metadata={"help": "distance in tokens between windows over a context that is longer (BERT's)"}
    )
    max_question_length: int = field(
        default=64, metadata={"help": "tokens of a question; the rest is cut off (BERT's)"}
    )
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    train_subset: str = II("dataset.train_subset")
    update_freq: List[int] = II("optimization.update_freq")


@register_task("squad", dataclass=SquadConfig)
class SquadTask(MicroBatchNoise, FairseqTask):
    """Every window over every context is a training example (see ``data.squad_dataset``). ``amos squad`` decodes answers
    and scores them; validation here is by loss and by accuracy of positions.
    """

    cfg: SquadConfig

    def __init__(self, cfg: SquadConfig, vocabulary: Vocabulary, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.vocabulary, self.dictionary = vocabulary, dictionary
        self.state.merge_state_dict(vocabulary.fingerprints())

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs: Any) -> "SquadTask":
        """:class:`UserError` for a directory or lengths that cannot be used."""
        if OmegaConf.is_missing(cfg, "data"):
            raise UserError("no data are named: give the directory that prepare.sh wrote, as task.data=DIR")
        window_limits(cfg).check()
        if not Path(cfg.data).is_dir():
            raise UserError(f"{cfg.data} is not a directory: give the one that preprocess/squad/prepare.sh wrote")
        read_manifest(Path(cfg.data))
        vocabulary = Vocabulary.of_corpus([Path(cfg.data)], None)
        return cls(cfg, vocabulary, vocabulary.load_dictionary())

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Optional[Dictionary]:
        return None

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        model = super().build_model(cfg, from_checkpoint)
        if not hasattr(model, "register_span_head"):
            raise UserError(f"--arch {cfg.arch} has no head for answers: give an architecture of amos_fairseq")
        model.register_span_head(str(self.cfg.span_head))
        return model

    def max_positions(self) -> int:
        return self.cfg.tokens_per_window

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Windows of ``split``; :class:`UserError` where its files are not there."""
        training = split == self.cfg.train_subset
        data = SquadSplit(Path(self.cfg.data), split)
        dataset = SquadWindowDataset(
            data, self.dictionary, limits=window_limits(self.cfg), seed=self.cfg.seed, training=training
        )
        logger.info(
            f"{dataset.source}: {len(data)} questions, {len(dataset)} windows of up to {dataset.sizes.max()} tokens"
        )
        self.datasets[split] = dataset

    def get_batch_iterator(
        self,
        dataset: SquadWindowDataset,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        max_positions: Optional[int] = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **ignored: Any,
    ) -> BlockBatchIterator:
        """Batches of ``max_sentences`` windows (or ``max_tokens`` // ``--tokens-per-window``, the smaller of both).

        One rank without ``--update-freq`` trains on every window in every epoch. With several micro-batches an update,
        windows that make no whole update are left out, others in each epoch: see ``whole_updates``.

        Raises:
            UserError: windows are longer than the model reads, or no batch has room for one.
        """
        length = self.cfg.tokens_per_window
        if max_positions is not None and max_positions < length:
            raise UserError(
                f"a window has --tokens-per-window {length} tokens, but the model's --max-positions or --max-tokens allows "
                f"{max_positions}: give no more"
            )
        batch_size = min(limit for limit in (max_sentences, max_tokens and max_tokens // length) if limit is not None)
        if batch_size < 1:
            raise UserError(f"--max-tokens {max_tokens} leaves no room for one window of --tokens-per-window {length}")
        dataset.set_epoch(epoch)
        indices, update_freq = dataset.ordered_indices(), 1
        if dataset.training:
            schedule = self.cfg.update_freq
            update_freq = schedule[min(epoch, len(schedule)) - 1]
            if num_shards * update_freq > 1:
                indices = whole_updates(indices, num_shards * update_freq * batch_size, dataset.source)
        return BlockBatchIterator(
            dataset,
            equal_batches(indices, batch_size),
            update_freq=update_freq,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
        )

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Before the first checkpoint can be written, the vocabulary lies in ``SAVE_DIR/tokenizer``."""
        on_first_rank(lambda: self.vocabulary.copy_into(self.cfg.save_dir))

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Compare a checkpoint's vocabulary with this task's; :class:`UserError` where they differ."""
        self.vocabulary.refuse_other(state_dict)


def window_limits(cfg: SquadConfig) -> WindowLimits:
    return WindowLimits(cfg.tokens_per_window, cfg.doc_stride, cfg.max_question_length)
