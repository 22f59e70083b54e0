"""Pretraining on plain text: blocks with masked positions, for every objective of this package."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, List, Optional  # noqa: UP035 (fairseq reads the types of config classes, in typing's spelling)

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import ChoiceEnum
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.tasks import register_task
from omegaconf import II, MISSING, OmegaConf

from amos_fairseq.checkpoints.read import load_generator
from amos_fairseq.compat.distribution import sum_over_ranks
from amos_fairseq.data.block_iterator import BlockBatchIterator, blocks_per_batch
from amos_fairseq.data.corpus import (
    Vocabulary,
    corpus_directories,
    count_tokens,
    read_blocks,
    require_split,
    shard_directories,
    unigram_entropy,
)
from amos_fairseq.data.masked_blocks import (
    OF_OBJECTIVE,
    TREATMENTS,
    MaskedBlockDataset,
    MaskTreatment,
    num_masked_positions,
)
from amos_fairseq.data.phases import Phase, PhasedBlocks, PhaseIterator, read_phases
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.errors import UserError
from amos_fairseq.models.pretraining import GeneratorNetwork, PretrainingModel
from amos_fairseq.run.hooks import HookSettings
from amos_fairseq.setting_checks import check_ranges, setting
from amos_fairseq.tasks.corpus_task import CorpusTask, arch_name
from amos_fairseq.text import MASK_SYMBOL, special_ids
from amos_fairseq.text.tokenization.fast_tokenizer import word_starts

logger = logging.getLogger(__name__)


@dataclass
class TextPretrainingConfig(HookSettings):
    data: str = setting(MISSING, "directory of the binarized corpus; dir0:dir1 are shards, each epoch uses the next")
    tokens_per_sample: int = setting(
        512, "tokens per block, <s> included (AMOS Table 3: sequence length 512)", "2 or more"
    )
    sample_break_mode: ChoiceEnum(["none", "complete", "complete_doc"]) = setting(
        "none",
        "where blocks end: none fills every block; complete ends a block at the end of a paragraph; complete_doc "
        "also at the end of a document; a paragraph longer than a block is cut",
    )
    mask_prob: float = setting(
        0.15, "share of a block's tokens that is masked (AMOS Appendix B: 15 %%)", "above 0 and below 1"
    )
    mask_treatment: ChoiceEnum(["default", *TREATMENTS]) = setting(
        "default",
        "the input at masked positions: mask: <mask>; bert: 80 %% <mask>, 10 %% a random token, 10 %% the "
        "original; electra: 85 %% <mask>, 15 %% the original; default: bert for the criterion mlm, electra for "
        "electra, mask for all others",
    )
    mask_rare_tokens: float = setting(
        0.0,
        "mask a token of the training text with a probability in proportion to its frequency to the power of minus "
        "this number; 0: all tokens equally often (thesis section 5.5)",
        "0 or more",
    )
    whole_words: bool = setting(
        False,
        "mask the pieces of a word together; the last word of a block is cut where it has more pieces than are left to "
        "mask. Punctuation and other pieces that the tokenizer writes without a mark of a new word belong to the word before "
        "them; in scripts without spaces each piece is a word",
    )
    phases: Any = setting(
        None,
        "parts of the run with blocks of different lengths: a list such as "
        "[{length: 128, share: 0.9}, {length: 512, share: 0.1, batch_size: 8, mask_prob: 0.2}]. share: of the updates, or of "
        "--minutes; the last length is --tokens-per-sample; a phase without batch_size or mask_prob has that of the run",
    )
    tokenizer_directory: Optional[str] = setting(  # noqa: UP045
        None, "tokenizer that binarized the corpus (default: DATA/tokenizer)"
    )
    started_from: Optional[str] = setting(  # noqa: UP045
        None,
        "sha256 of the weights from which amos adapt began, which are validated before the first update; in checkpoints",
    )
    objective: str = II("criterion._name")
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")
    train_subset: str = II("dataset.train_subset")
    update_freq: List[int] = II("optimization.update_freq")  # noqa: UP006


@register_task("text_pretraining", dataclass=TextPretrainingConfig)
class TextPretrainingTask(CorpusTask):
    """Pretraining on blocks of text. Epoch e uses shard (e - 1) mod n. Random numbers: ``amos_fairseq.data.seeding``."""

    cfg: TextPretrainingConfig
    length = "tokens_per_sample"
    # Set at the first use, from the training text.
    _mask_weights: np.ndarray | None = None
    # [tokens of the dictionary] bool, of --whole-words.
    word_starts: np.ndarray | None = None
    # Returns the phase of the next update: run/schedule.py knows the updates and the time of the run.
    due_phase: Callable[[], int] | None = None
    # Of the last epoch that was begun, where the run has phases.
    phase_iterator: PhaseIterator | None = None

    def __init__(self, cfg: TextPretrainingConfig, vocabulary: Vocabulary, dictionary: Dictionary) -> None:
        super().__init__(cfg, vocabulary, dictionary)
        whole_run = Phase(cfg.tokens_per_sample, 1.0, None, cfg.mask_prob)
        self.phases = read_phases(cfg.phases, cfg.tokens_per_sample, cfg.mask_prob)
        self.of_validation = whole_run  # length and share of masked tokens
        self.of_step = (self.phases or [whole_run])[0]  # the same of the present step's phase

    @classmethod
    def setup_task(cls, cfg: TextPretrainingConfig, **kwargs: Any) -> "TextPretrainingTask":
        """Read the vocabulary, and check paths, dictionaries and settings."""
        check_ranges(cfg, TextPretrainingConfig)
        phases = read_phases(cfg.phases, cfg.tokens_per_sample, cfg.mask_prob)
        is_electric = cfg.objective == "electric"
        for is_wrong, message in (
            (
                OmegaConf.is_missing(cfg, "data"),
                "no corpus is given: give the directory of amos prepare as task.data=DIR",
            ),
            (
                is_electric and cfg.mask_rare_tokens,
                "--mask-rare-tokens has no meaning for the criterion electric, whose noise has one probability: leave it out",
            ),
            (
                is_electric and {phase.mask_prob for phase in phases} - {cfg.mask_prob},
                "task.phases (--phases): the noise of electric has one mask_prob: set --mask-prob alone",
            ),
            (
                phases and cfg.sample_break_mode != "none",
                f"task.phases (--phases) need full blocks: leave out --sample-break-mode {cfg.sample_break_mode}",
            ),
            (
                cfg.whole_words and cfg.mask_rare_tokens,
                "--whole-words and --mask-rare-tokens choose what is masked in two ways: leave one out",
            ),
        ):
            if is_wrong:
                raise UserError(message)
        shards = corpus_directories(shard_directories(cfg.data))
        cfg.data = os.pathsep.join(map(str, shards))  # fairseq counts them
        vocabulary = Vocabulary.of_corpus(shards, cfg.tokenizer_directory)
        tokenizer = vocabulary.load_tokenizer()
        dictionary = vocabulary.load_dictionary()
        logger.info(f"dictionary: {len(dictionary)} types, {MASK_SYMBOL} included")
        if tokenizer is not None:
            dictionary.protected_symbols = tokenizer.protected_symbols
        task = cls(cfg, vocabulary, dictionary)
        if cfg.whole_words:
            if tokenizer is None:
                raise UserError(
                    f"--whole-words needs the tokenizer of {cfg.data}, which has only a dictionary: leave it out"
                )
            task.word_starts = word_starts(tokenizer)
        return task

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def special_ids(self) -> list[int]:
        """Ids that are never masked, never a target and never sampled, ascending."""
        return special_ids(self.dictionary)

    @property
    def masked_share(self) -> float:
        """r = ceil(mask_prob * T) / T: puts sums over real tokens on the scale of sums over masked positions."""
        length = self.of_step.length
        return num_masked_positions(self.of_step.mask_prob, length) / length

    @property
    def mask_treatment(self) -> MaskTreatment:
        """The generator's input at masked positions."""
        name = self.cfg.mask_treatment
        return TREATMENTS[OF_OBJECTIVE.get(self.cfg.objective, "mask") if name == "default" else name]

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> PretrainingModel:
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, PretrainingModel):
            raise UserError(f"--arch {arch_name(cfg)} is not pretrained on masked blocks: give one of amos_fairseq")
        for positions in model.learned_positions() if self.phases else ():
            positions.repeat_first(self.phases[0].length)
        return model

    def load_generator(self, cfg: Any) -> list[GeneratorNetwork]:
        """Read the frozen generator of a model with the settings ``cfg``; checkpoints hold the sha256 of its weights."""
        has_corpus = bool(self.vocabulary.dictionary_sha256)  # False where a vocabulary of this size is made up
        networks, sha256 = load_generator(cfg, self.dictionary, compares_tokens=has_corpus)
        if self.state_dict().get("generator_sha256") is None:
            self.state.merge_state_dict({"generator_sha256": sha256})
            sizes = (f"{len(network.encoder.layers)} x {network.encoder.shape.width}" for network in networks)
            logger.info(f"frozen generator (layers x width): {', '.join(sizes)}; the recipe's own has no effect")
        return networks

    def count_training_tokens(self) -> torch.Tensor:
        """Count each token of the dictionary in the training text of all shards: int64 [tokens]. Each rank counts its part of
        the text, so every rank must call this."""
        paths = [os.path.join(directory, self.cfg.train_subset) for directory in shard_directories(self.cfg.data)]
        for path in paths:
            require_split(path)
        logger.info(f"counting the tokens of {', '.join(paths)}")
        counts = sum_over_ranks(
            count_tokens(
                (data_utils.load_indexed_dataset(path, self.dictionary, combine=True) for path in paths),
                len(self.dictionary),
                rank=distributed_utils.get_global_rank(),
                num_ranks=distributed_utils.get_global_world_size(),
            )
        )
        counts[self.special_ids] = 0
        return counts

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load the blocks of one shard's ``split``; with ``combine`` also of ``split1``, ``split2``, ..."""
        directories = shard_directories(self.cfg.data)
        training = split == self.cfg.train_subset
        for directory in directories if training else directories[:1]:
            require_split(os.path.join(directory, split))
        path = os.path.join(directories[(epoch - 1) % len(directories)], split)
        blocks = read_blocks(
            path, self.dictionary, self.cfg.tokens_per_sample, str(self.cfg.sample_break_mode), combine=combine
        )
        if training:
            more = {"mask_weights": self.mask_weights() if self.cfg.mask_rare_tokens else None}
        else:
            more = {"unigram_entropy": self.unigram_entropy(path, combine)}
        self.datasets[split] = self.mask_blocks(blocks, training=training, source=path, **more)

    def unigram_entropy(self, path: str, combine: bool) -> float:
        """Return the entropy of the non-special tokens of a binarized text, in nats; 0 if it has none."""
        counts = count_tokens(
            [data_utils.load_indexed_dataset(path, self.dictionary, combine=combine)], len(self.dictionary)
        )
        counts[self.special_ids] = 0
        return unigram_entropy(counts)

    def mask_weights(self) -> np.ndarray:
        """Return the weight of each token as a masked token of the training text: [tokens] float64 (thesis section 5.5).

        weight(x) = count(x)^-a with a = ``--mask-rare-tokens``. The thesis masks "rarer tokens more frequently".

        Departures: it gives no formula; the power is ours. Validation masks all tokens equally often, so that its losses can
        be compared with those of other runs. The other idea of that section, a model that predicts which tokens are difficult,
        is left out.
        """
        if self._mask_weights is None:
            counts = self.count_training_tokens().clamp(min=1).numpy()  # special tokens are never masked
            self._mask_weights = counts ** -float(self.cfg.mask_rare_tokens)
        return self._mask_weights

    def mask_blocks(self, blocks: Any, *, training: bool, **more: Any) -> MaskedBlockDataset:
        """Return a data set of these blocks with the settings of this task, and ``more``."""
        kind = PhasedBlocks if training and self.phases else MaskedBlockDataset
        return kind(
            blocks,
            self.dictionary,
            tokens_per_block=self.cfg.tokens_per_sample,
            mask_prob=self.cfg.mask_prob,
            seed=self.cfg.seed,
            treatment=self.mask_treatment,
            word_starts=self.word_starts,
            training=training,
            **more,
        )

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        epoch: int = 1,
        **settings: Any,
    ) -> BlockBatchIterator:
        """Return the batches of an epoch; with phases, those of the phase that is due after what this run has read of it."""
        limits = max_tokens, max_sentences, max_positions
        if not isinstance(dataset, PhasedBlocks):
            return super().get_batch_iterator(dataset, *limits, epoch=epoch, **settings)
        before = self.phase_iterator
        start = before.position if before is not None and before.epoch == epoch else 0
        sizes = [phase.batch_size or blocks_per_batch(phase.length, *limits) for phase in self.phases]
        settings = self.iterator_settings(dataset, epoch, **settings)
        self.phase_iterator = PhaseIterator(dataset, self.phases, sizes, self.due_phase or int, start, **settings)
        return self.phase_iterator

    def before_step(self, sample: dict[str, Any], criterion: Any, update_num: int) -> dict[str, Any]:
        if self.phase_iterator is not None:
            self.of_step = self.phases[self.phase_iterator.phase]
            metrics.log_scalar("tokens_per_block", self.of_step.length, round=1)
        return sample

    def full_batch(self, max_tokens: int | None, max_sentences: int | None, max_positions: int) -> dict[str, Any]:
        """Return a micro-batch of full blocks of one repeated piece, as large as these limits allow, to count its FLOPs."""
        special = set(self.special_ids)
        piece = next(index for index in range(len(self.dictionary)) if index not in special)
        block = torch.full((self.cfg.tokens_per_sample - 1,), piece)
        blocks = self.mask_blocks([block], training=True, source="a synthetic block")
        size = blocks_per_batch(self.cfg.tokens_per_sample, max_tokens, max_sentences, max_positions)
        return blocks.collater([blocks[0]] * size)

    def begin_epoch(self, epoch: int, model: PretrainingModel) -> None:
        """Before the first update, copy the vocabulary into ``SAVE_DIR/tokenizer`` and give the model the token counts, which a
        continued run has from its checkpoint."""
        super().begin_epoch(epoch, model)
        if self.phase_iterator is not None:
            phase = self.phases[self.phase_iterator.phase]
            for positions in model.learned_positions():
                positions.share(phase.length)
            logger.info(
                f"epoch {epoch}, phase {self.phase_iterator.phase + 1} of {len(self.phases)}: blocks of {phase.length} tokens"
            )
        if model.awaits_token_counts:
            model.set_token_counts(self.count_training_tokens())

    def write_vocabulary(self) -> None:
        target = self.vocabulary.copy_into(self.cfg.save_dir)
        if self.vocabulary.tokenizer_directory is None:
            advice = "amos verify DATA --tokenizer FILE gives it one, for export and fine-tuning"
            logger.info(f"the corpus has no tokenizer: {target} holds the dictionary alone; {advice}")

    def valid_step(
        self, sample: dict[str, Any], model: Any, criterion: Any
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """Run fairseq's step with the same noise in every validation, on any rank; training's generators are unchanged. The
        text's unigram entropy, to which the MLM loss is compared, is logged with it."""
        self.of_step = self.of_validation
        if "unigram_entropy" in sample:  # not in the training batch of a rank that has no data left
            metrics.log_scalar("unigram_entropy", sample["unigram_entropy"], round=3)
        device = sample["net_input"]["tokens"].device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(noise_seed(Purpose.VALIDATION_NOISE, self.cfg.seed, 0, sample["first_id"]))
            return super().valid_step(sample, model, criterion)
