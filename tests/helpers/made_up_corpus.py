"""A binarized corpus without a run of fairseq-preprocess, and the task that reads it, for unit tests."""

import shutil
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset
from omegaconf import OmegaConf

from amos_fairseq.tasks.text_pretraining import TextPretrainingConfig, TextPretrainingTask

TOKENS_PER_SAMPLE = 16
NUM_WORDS = 30


def write_split(directory: Path, split: str, num_lines: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    builder = indexed_dataset.make_builder(str(directory / f"{split}.bin"), "mmap", vocab_size=4 + NUM_WORDS)
    for _ in range(num_lines):
        words = generator.integers(4, 4 + NUM_WORDS, size=generator.integers(3, 30))
        builder.add_item(torch.from_numpy(np.append(words, 2)).int())
    builder.finalize(str(directory / f"{split}.idx"))


def write_corpus(directory: Path, *, seed: int = 0, num_lines: int = 60, tokenizer: bool = True) -> Path:
    """What prepare.sh leaves in one directory."""
    directory.mkdir(parents=True)
    dictionary = Dictionary()
    for word in range(NUM_WORDS):
        dictionary.add_symbol(f"w{word}", n=NUM_WORDS - word)
    dictionary.save(str(directory / "dict.txt"))
    write_split(directory, "train", num_lines, seed)
    write_split(directory, "valid", 20, seed + 100)
    if tokenizer:
        (directory / "tokenizer").mkdir()
        shutil.copy(directory / "dict.txt", directory / "tokenizer")
        (directory / "tokenizer" / "tokenizer.json").write_text("{}\n")
    return directory


def make_task(data: Path | str, **settings) -> TextPretrainingTask:
    values = {
        "data": str(data),
        "tokens_per_sample": TOKENS_PER_SAMPLE,
        "seed": 3,
        "save_dir": "unused",
        "objective": "amos",
    }
    values |= {"train_subset": "train", "update_freq": [1]} | settings
    return TextPretrainingTask.setup_task(OmegaConf.merge(OmegaConf.structured(TextPretrainingConfig), values))
