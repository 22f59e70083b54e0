"""The loops of ``bench.py --fine-tuning``: updates of ``amos classify`` and of Hugging Face's model, on the same rows."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from hugging_face_peers import FineTuningLoop
from omegaconf import DictConfig, OmegaConf
from training_step import Batch, Setup, UnsavedTrainer

from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.downstream.labeled_task import LabeledSequences
from amos_fairseq.downstream.texts.task import TextClassificationTask
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.benchmark import MODEL_FIELDS
from amos_fairseq.experiments.recipes import Hyperparameters
from amos_fairseq.flops import synthetic_dictionary
from amos_fairseq.models.configuration import PaddedVocabulary
from amos_fairseq.setting_checks import as_flags

NUM_ROWS = 4000  # of synthetic texts
# Lengths of synthetic texts, tokens: log-normal, as those of sentences are.
MEDIAN_LENGTH, LOG_DEVIATION, SHORTEST = 16, 0.7, 4
RECIPE = {"lr": 1e-4, "epochs": 1, "batch_size": 32, "warmup": 0.1, "weight_decay": 0.01, "bias_correction": True}


class SyntheticTexts(LabeledSequences):
    """Rows of random tokens with random classes, of very different lengths."""

    def __init__(self, directory: Path, dictionary: Any, longest: int, seed: int) -> None:
        super().__init__(directory, "train", seed, training=True)
        generator = np.random.default_rng(seed)
        lengths = np.exp(generator.normal(np.log(MEDIAN_LENGTH), LOG_DEVIATION, NUM_ROWS)).round().astype(np.int64)
        self.sizes = lengths.clip(SHORTEST, longest)
        self.rows = [
            torch.from_numpy(generator.integers(dictionary.nspecial, len(dictionary) - 1, length))
            for length in self.sizes
        ]
        self.targets = torch.from_numpy(generator.integers(0, 2, NUM_ROWS))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": int(index), "tokens": self.rows[index]}

    def add_labels(self, batch: Batch, samples: Sequence[dict[str, Any]]) -> None:
        batch["target"] = self.targets[batch["id"]]


class Rows:
    """The token ids of a data set by index."""

    def __init__(self, dataset: LabeledSequences) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.dataset[index]["tokens"]


@dataclass
class Loops:
    """Our loop is the iterator of the task, which collates a batch, and an update of fairseq's trainer with our hooks."""

    trainer: UnsavedTrainer
    batches: Iterator[Batch]
    peer: FineTuningLoop

    @classmethod
    @contextlib.contextmanager
    def built(cls, setup: Setup, data: str, similar_lengths: bool) -> Iterator["Loops"]:
        """Build both models.

        Args:
            data: directory of a prepared classification; "" for synthetic rows.
        """
        with tempfile.TemporaryDirectory() as save_dir:
            cfg = training_configuration(setup, data, similar_lengths, save_dir)
            task = make_task(cfg, data, setup)
            dataset = task.dataset("train")
            torch.manual_seed(cfg.common.seed)
            trainer = UnsavedTrainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
            vocabulary, targets = PaddedVocabulary.of(task.source_dictionary), torch.as_tensor(dataset.targets)
            peer = FineTuningLoop(cfg, setup.device, vocabulary, Rows(dataset), targets)
            yield cls(trainer, our_batches(task, dataset, cfg), peer)

    def update_ours(self) -> Batch:
        """Train on the next batch and return it."""
        batch = next(self.batches)
        with metrics.aggregate(new_root=True):
            self.trainer.train_step([batch])
        return batch


def training_configuration(setup: Setup, data: str, similar_lengths: bool, save_dir: str) -> DictConfig:
    """Return the configuration of ``fairseq-train`` with the flags of ``amos classify``."""
    recipe = Hyperparameters(**RECIPE, similar_lengths=similar_lengths)
    model = OmegaConf.to_container(setup.cfg.model, enum_to_str=True)
    flags = [data or save_dir, "--task", "text_classification", "--criterion", "text_classification"]
    flags += ["--arch", model["_name"], *as_flags({name: model[name] for name in sorted(MODEL_FIELDS & model.keys())})]
    flags += [
        "--tokens-per-text",
        str(model["max_positions"]),
        *recipe.train_flags(recipe.schedule(NUM_ROWS)),
        "--seed",
        "1",
    ]
    flags += ["--save-dir", save_dir, "--num-workers", "0"]
    if setup.device.type == "cpu":
        flags.append("--cpu")
    parsed = options.parse_args_and_arch(options.get_training_parser(), flags)
    cfg = convert_namespace_to_omegaconf(parsed)
    cfg.distributed_training.distributed_world_size = 1
    return cfg


def make_task(cfg: DictConfig, data: str, setup: Setup) -> TextClassificationTask:
    if data:
        task = TextClassificationTask.setup_task(cfg.task)
        if task.record["kind"] != "classes":
            raise UserError(f"{data} has {task.record['kind']}: a classification into classes is measured")
        task.load_dataset("train")
        return task
    vocabulary = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)
    record = {"task": "synthetic", "kind": "classes", "labels": ["0", "1"], "num_classes": 2}
    task = TextClassificationTask(cfg.task, vocabulary, synthetic_dictionary(setup.vocabulary_size), record)
    longest = cfg.model.max_positions
    task.datasets["train"] = SyntheticTexts(Path("synthetic"), task.dictionary, longest, cfg.common.seed)
    return task


def our_batches(task: TextClassificationTask, dataset: LabeledSequences, cfg: DictConfig) -> Iterator[Batch]:
    """Yield batches of one epoch after another, as the loader of a training collates them."""
    for epoch in itertools.count(1):
        iterator = task.get_batch_iterator(dataset, max_sentences=cfg.dataset.batch_size, epoch=epoch)
        yield from iterator.next_epoch_itr()
