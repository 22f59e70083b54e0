"""Prepared GLUE data of a few made-up rows, in the layout of ``preprocess/glue/prepare.sh``, and a SAVE_DIR to start from."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from saved_models import small_tokenizer, write_checkpoint

from amos_fairseq.finetuning.session import Session, open_session
from amos_fairseq.tokenization import Tokenizer, load_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "end", "a", "and", "of"]
INFERENCE = ("entailment", "neutral", "contradiction")
# What fairseq and its trainer look for in a checkpoint, beside what readers of ours look at.
TRAINED = {"extra_state": {"train_iterator": {"epoch": 2}, "previous_training_time": 1000.0}}


def write_pretrained_checkpoint(directory: Path) -> Path:
    """A SAVE_DIR with an untrained AMOS model (16 wide, 80 positions) and its tokenizer; returns the checkpoint."""
    tokenizer = small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    history = [{"num_updates": 7, "criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}]
    write_checkpoint(directory, tokenizer, optimizer_history=history, **TRAINED)
    return directory / "checkpoint_last.pt"


def session(start: Path, out: Path, **options: Any) -> Session:
    """Recipe ``amos`` on the CPU, two seeds unless ``options`` of :func:`open_session` say otherwise."""
    return open_session(str(start), str(out), "amos", cpu=True, **{"num_seeds": 2, **options})


def write_text(data: Path) -> None:
    """A text to pretrain on, 66 blocks of 128 tokens, in the layout of ``preprocess/pretraining/prepare.sh``."""
    tokenizer = small_tokenizer()
    tokenizer.save(data / "tokenizer")
    dictionary = Dictionary.load(str(data / "tokenizer" / "dict.txt"))
    dictionary.save(str(data / "dict.txt"))
    for split, lines in (("train", 420), ("valid", 20)):
        sentences = [WORDS[line % 12 :] + WORDS[: line % 7] for line in range(lines)]
        encoded = [[dictionary.index(piece) for piece in tokenizer.encode(" ".join(words))] for words in sentences]
        write_rows(data, split, [[*row, dictionary.eos()] for row in encoded])


def write_glue(data: Path, start: Path, task: str, labels: Sequence[str], rows: dict[str, int], pair: bool) -> None:
    """Random sentences whose class is the first word's place in a list, or whose score (no ``labels``) is its half.

    Args:
        start: SAVE_DIR of the checkpoint, whose tokenizer is taken.
        rows: split -> number of rows; test splits get no labels.
    """
    (data / "tokenizer").mkdir(parents=True, exist_ok=True)
    for file in (start / "tokenizer").iterdir():
        (data / "tokenizer" / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer(start / "tokenizer")
    dictionary = Dictionary.load(str(start / "tokenizer" / "dict.txt"))
    draw, splits = random.Random(task), {}
    for split, number in rows.items():
        classes = [draw.randrange(len(labels) or 10) for _ in range(number)]
        texts = [" ".join([WORDS[value], *draw.choices(WORDS, k=draw.randint(0, 6))]) for value in classes]
        write_texts(data / task / "input0", split, texts, tokenizer, dictionary)
        if pair:
            write_texts(data / task / "input1", split, texts[::-1], tokenizer, dictionary)
        if not split.startswith("test"):
            write_labels(data / task / "label", split, classes, labels)
        splits[split] = {"source": f"{split}.tsv", "source_rows": number, "broken": 0, "rows": number}
    kind = "classification" if labels else "regression"
    record = {"task": task, "kind": kind, "num_classes": len(labels) or 1, "labels": list(labels), "splits": splits}
    (data / task / "task.json").write_text(json.dumps(record), encoding="utf-8")


def write_texts(
    directory: Path, split: str, texts: Sequence[str], tokenizer: Tokenizer, dictionary: Dictionary
) -> None:
    rows = [[dictionary.index(piece) for piece in tokenizer.encode(text)] + [dictionary.eos()] for text in texts]
    write_rows(directory, split, rows)
    dictionary.save(str(directory / "dict.txt"))


def write_labels(directory: Path, split: str, classes: Sequence[int], labels: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not labels:
        lines = "".join(f"{value / 2}\n" for value in classes)
        (directory / f"{split}.label").write_text(lines, encoding="utf-8")
        return
    dictionary = Dictionary()
    for label in labels:
        dictionary.add_symbol(label)
    write_rows(directory, split, [[dictionary.nspecial + value, dictionary.eos()] for value in classes])
    dictionary.save(str(directory / "dict.txt"))


def write_rows(directory: Path, split: str, rows: Sequence[Sequence[int]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    builder = MMapIndexedDatasetBuilder(str(directory / f"{split}.bin"))
    for row in rows:
        builder.add_item(torch.tensor(row))
    builder.finalize(str(directory / f"{split}.idx"))


def change_task(data: Path, directory: str, /, **changes: Any) -> None:
    """Replace parts of the ``task.json`` in ``data/directory``."""
    file = data / directory / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
