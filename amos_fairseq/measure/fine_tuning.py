"""``amos bench --finetuning``: the loop of a fine-tuning, beside a plain loop with Hugging Face's model of the same sizes.

Both train a classifier with two classes on the same batches, in turns, an update each. Ours is the iterator of the task, which
collates a batch, and an update of fairseq's trainer with the hooks of this package. The peer is a loop as its users write it:
``ElectraForSequenceClassification``, ``torch.optim.AdamW``, a linear schedule, no clipping; the longest row of a batch
sets its length.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.write import as_flags
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.classification.task import TextClassificationTask
from amos_fairseq.downstream.labeled_task import LabeledSequences
from amos_fairseq.downstream.recipes import Hyperparameters
from amos_fairseq.downstream.session import MODEL_FIELDS
from amos_fairseq.errors import UserError
from amos_fairseq.measure.configuration import BenchSettings, BenchSetup, set_up, synthetic_dictionary
from amos_fairseq.measure.fairseq_step import UnsavedTrainer
from amos_fairseq.measure.hugging_face import network_config
from amos_fairseq.measure.measurement import MedianAndRange, Progress, describe_machine, synchronize, versions
from amos_fairseq.models.configuration import MODERN, PaddedVocabulary, transformer_config

NUM_ROWS = 4000  # of synthetic texts
# Lengths of synthetic texts, tokens: log-normal, as those of sentences are.
MEDIAN_LENGTH, LOG_DEVIATION, SHORTEST = 16, 0.7, 4
RECIPE = {"lr": 1e-4, "epochs": 1, "batch_size": 32, "warmup": 0.1, "weight_decay": 0.01, "bias_correction": True}


class SyntheticTexts(LabeledSequences):
    """Rows of random tokens with random classes, of very different lengths."""

    def __init__(self, directory: Path, dictionary: Any, longest: int, seed: int) -> None:
        super().__init__(directory, "train", dictionary, seed, training=True)
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

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        batch["target"] = self.targets[batch["id"]]


@dataclass(frozen=True)
class LoopSpeed:
    """The speed of both loops on one kind of batches; seconds and rows of each update, in the order of the updates.

    Attributes:
        padding: share of the positions of all batches that is padding.
    """

    similar_lengths: bool
    rows: list[int]
    ours: list[float]
    theirs: list[float]
    padding: float

    @property
    def ratio(self) -> MedianAndRange:
        """How many times as fast ours is, update by update."""
        return MedianAndRange.of([their / our for our, their in zip(self.ours, self.theirs, strict=True)])

    def rows_per_second(self, seconds: list[float]) -> float:
        return sum(self.rows) / sum(seconds)


def bench_fine_tuning(settings: BenchSettings, data: str, progress: Progress = lambda text: None) -> list[LoopSpeed]:
    """Measure both loops with random batches, then with batches of similar length.

    Args:
        data: directory with ``task.json`` of a classification; "" for synthetic rows.

    Raises:
        UserError: the settings or the data cannot be used.
    """
    if settings.precision not in (None, "float32"):
        raise UserError("--finetuning measures float32: leave --precision out, or give float32")
    setup = set_up(dataclasses.replace(settings, precision="float32"))
    if setup.cfg.model.get("relative_position_scheme", "none") != "none":
        raise UserError(
            f"Hugging Face's ELECTRA has no relative positions: give a recipe such as electra_small, or --set "
            f"model.relative_position_scheme=none, for {settings.config}"
        )
    return [measure_loops(settings, setup, data, similar, progress) for similar in (False, True)]


def measure_loops(
    settings: BenchSettings, setup: BenchSetup, data: str, similar_lengths: bool, progress: Progress
) -> LoopSpeed:
    with tempfile.TemporaryDirectory() as save_dir:
        cfg = training_configuration(setup, data, similar_lengths, save_dir)
        task = make_task(cfg, data, setup)
        dataset = task.dataset("train")
        torch.manual_seed(cfg.common.seed)
        trainer = UnsavedTrainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        peer = HuggingFaceLoop(cfg.model, setup.device, task, dataset)
        rows, ours, theirs, positions, tokens = [], [], [], 0, 0
        batches = our_batches(task, dataset, cfg)
        for number in range(settings.warmup + settings.steps):
            progress(f"{'similar lengths' if similar_lengths else 'random batches'}: update {number + 1}")
            start = clock(setup.device)
            batch = next(batches)
            with metrics.aggregate(new_root=True):
                trainer.train_step([batch])
            middle = clock(setup.device)
            peer.update(batch["id"].tolist())
            end = clock(setup.device)
            if number >= settings.warmup:
                rows.append(batch["nsentences"])
                ours.append(middle - start)
                theirs.append(end - middle)
                positions += batch["net_input"]["src_tokens"].numel()
                tokens += batch["ntokens"]
    return LoopSpeed(similar_lengths, rows, ours, theirs, 1 - tokens / positions)


def clock(device: torch.device) -> float:
    """Return seconds: on a CPU those of this process, which another program does not lengthen."""
    synchronize(device)
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def training_configuration(setup: BenchSetup, data: str, similar_lengths: bool, save_dir: str) -> DictConfig:
    """Return the configuration of ``fairseq-train`` with the flags of ``amos classify``."""
    recipe = Hyperparameters(**RECIPE, similar_lengths=similar_lengths)
    model = OmegaConf.to_container(setup.cfg.model, enum_to_str=True)
    flags = [data or save_dir, "--task", "text_classification", "--criterion", "text_classification"]
    flags += ["--arch", model["_name"], *as_flags({name: model[name] for name in sorted(MODEL_FIELDS & model.keys())})]
    flags += ["--tokens-per-text", str(model["max_positions"]), *recipe.train_flags(NUM_ROWS), "--seed", "1"]
    flags += ["--save-dir", save_dir, "--num-workers", "0", *(["--cpu"] if setup.device.type == "cpu" else [])]
    parsed = options.parse_args_and_arch(options.get_training_parser(), flags)
    cfg = convert_namespace_to_omegaconf(parsed)
    cfg.distributed_training.distributed_world_size = 1
    return cfg


def make_task(cfg: DictConfig, data: str, setup: BenchSetup) -> TextClassificationTask:
    if data:
        task = TextClassificationTask.setup_task(cfg.task)
        if task.record["kind"] != "classes":
            raise UserError(f"{data} has {task.record['kind']}: --finetuning measures a classification into classes")
        task.load_dataset("train")
        return task
    vocabulary = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)
    record = {"task": "synthetic", "kind": "classes", "labels": ["0", "1"], "num_classes": 2}
    task = TextClassificationTask(cfg.task, vocabulary, synthetic_dictionary(setup.vocabulary_size), record)
    task.datasets["train"] = SyntheticTexts(
        Path("synthetic"), task.dictionary, cfg.model.max_positions, cfg.common.seed
    )
    return task


def our_batches(task: TextClassificationTask, dataset: LabeledSequences, cfg: DictConfig) -> Iterator[dict[str, Any]]:
    """Yield batches of one epoch after another, as the loader of a training collates them."""
    for epoch in itertools.count(1):
        iterator = task.get_batch_iterator(dataset, max_sentences=cfg.dataset.batch_size, epoch=epoch)
        yield from iterator.next_epoch_itr()


class HuggingFaceLoop:
    """The plain loop: the rows of a batch are padded, then forward, backward, AdamW and the schedule."""

    def __init__(
        self, model: DictConfig, device: torch.device, task: TextClassificationTask, dataset: LabeledSequences
    ) -> None:
        # Imported here: transformers takes seconds to import.
        from transformers import (
            ElectraForSequenceClassification,
            ModernBertForSequenceClassification,
            get_linear_schedule_with_warmup,
        )

        rows = PaddedVocabulary.of(task.source_dictionary).padded_size
        config = network_config(transformer_config(model), rows, dataset.pad)
        config.num_labels = task.record["num_classes"]
        config.classifier_dropout = model.pooler_dropout
        config._attn_implementation = "sdpa"
        self.device, self.dataset = device, dataset
        is_modern = model.encoder == MODERN
        model_class = ModernBertForSequenceClassification if is_modern else ElectraForSequenceClassification
        self.model = model_class(config).to(device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RECIPE["lr"], weight_decay=RECIPE["weight_decay"]
        )
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 10, 100_000)
        self.targets = torch.as_tensor(dataset.targets)

    def update(self, ids: list[int]) -> Tensor:
        """Train on the rows ``ids``; return the loss, a scalar."""
        rows = [self.dataset[index]["tokens"] for index in ids]
        tokens = pad_sequence(rows, batch_first=True, padding_value=self.dataset.pad).to(self.device)
        output = self.model(
            input_ids=tokens,
            attention_mask=tokens.ne(self.dataset.pad).long(),
            labels=self.targets[ids].to(self.device),
        )
        output.loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return output.loss.detach()


def as_page(settings: BenchSettings, data: str, speeds: list[LoopSpeed], device: torch.device) -> str:
    """Return the Markdown page."""
    unit = "CPU seconds of the process" if device.type == "cpu" else "seconds"
    lines = [
        f"# {settings.recipe_name}: fine-tuning beside a plain loop with Hugging Face's ELECTRA",
        "",
        f"Rows/s ({unit}) over {settings.steps} updates of {RECIPE['batch_size']} rows "
        f"({data or f'{NUM_ROWS:,} synthetic rows'}), in turns; ratio: median (minimum to maximum) over updates.",
        "",
        "| batches | padding | ours | Hugging Face | ratio |",
        "|---|---|---|---|---|",
    ]
    for each in speeds:
        ratio = each.ratio
        lines.append(
            f"| {'similar lengths' if each.similar_lengths else 'random'} | {100 * each.padding:.0f} % | "
            f"{each.rows_per_second(each.ours):,.0f} | {each.rows_per_second(each.theirs):,.0f} | "
            f"{ratio.median:.2f} ({ratio.min:.2f} to {ratio.max:.2f}) |"
        )
    machine = describe_machine(device)
    place = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
    lines += ["", f"{place}, {machine['system']}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions().items()), ""]
    return "\n".join(lines)
