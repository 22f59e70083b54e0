"""Synthetic corpora: documents as ``amos prepare`` reads them, what it must write, and binarized data for unit tests."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from omegaconf import OmegaConf

from amos_fairseq.tasks.text_pretraining import TextPretrainingConfig, TextPretrainingTask
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

Document = tuple[str, ...]
TOKENS_PER_SAMPLE = 16
NUM_WORDS = 30


def make_documents(number: int) -> list[Document]:
    """Documents of one to six paragraphs, with rare characters, special spellings and two exact copies."""
    generator = random.Random(5)
    syllables = ["ba", "ke", "li", "mo", "nu", "ta", "re", "si", "on", "Ing"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(400)]
    words += ["<mask>", "</s>", "can't", "naïve", "中国", "☃"]
    documents = [
        tuple(" ".join(generator.choices(words, k=generator.randint(3, 30))) for _ in range(generator.randint(1, 6)))
        for _ in range(number - 1)
    ]
    return [*documents, documents[number // 2]]


DOCUMENTS = make_documents(240)
# Small settings that give several shards.
FLAGS = ["--vocab-size", "200", "--shard-megabytes", "0.03", "--valid-share", "0.05"]


def write_text(path: Path, documents: Iterable[Document]) -> Path:
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, documents: Iterable[Document]) -> Path:
    path.write_text("".join(json.dumps({"text": "\n".join(d), "id": 1}) + "\n" for d in documents), encoding="utf-8")
    return path


def read_binarized(prefix: Path) -> list[tuple[tuple[int, ...], ...]]:
    """Documents as tuples of lines of ids, each line with its ``</s>``; a line of ``</s>`` alone separates two."""
    documents: list[list[tuple[int, ...]]] = [[]]
    dataset = MMapIndexedDataset(str(prefix))
    for index in range(len(dataset)):
        line = tuple(dataset[index].tolist())
        if len(line) == 1:
            documents.append([])
        else:
            documents[-1].append(line)
    assert all(documents), "an empty line without a document before or behind it"
    return [tuple(document) for document in documents]


def encode_naively(out: Path, documents: Iterable[Document]) -> Counter:
    """The documents as ``read_binarized`` should find them: one paragraph at a time, through fairseq's dictionary."""
    tokenizer = load_tokenizer(out / "tokenizer")
    dictionary = Dictionary.load(str(out / "tokenizer" / "dict.txt"))

    def encode(paragraph: str) -> tuple[int, ...]:
        pieces = tokenizer.encode(paragraph)
        return (*(dictionary.index(piece) for piece in pieces), dictionary.eos())

    return Counter(tuple(encode(paragraph) for paragraph in document) for document in documents)


def shard_directories(out: Path) -> list[Path]:
    manifest = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    return [out / shard["directory"] for shard in manifest["shards"]]


def file_bytes(out: Path) -> dict[str, bytes]:
    """Every file of a corpus by its relative name; ``corpus.json`` without the path that it names."""
    content = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(content["corpus.json"])
    manifest["task_data"] = manifest["task_data"].replace(str(out), "OUT")
    content["corpus.json"] = json.dumps(manifest).encode("utf-8")
    return content


def write_rows(directory: Path, split: str, rows: Iterable[Sequence[int]]) -> None:
    """A split as fairseq-preprocess writes it for less than 65,500 symbols."""
    directory.mkdir(parents=True, exist_ok=True)
    builder = MMapIndexedDatasetBuilder(str(directory / f"{split}.bin"), np.uint16)
    for row in rows:
        builder.add_item(torch.as_tensor(row))
    builder.finalize(str(directory / f"{split}.idx"))


def write_split(directory: Path, split: str, num_lines: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = (generator.integers(4, 4 + NUM_WORDS, size=generator.integers(3, 30)) for _ in range(num_lines))
    write_rows(directory, split, (np.append(row, 2) for row in rows))


def write_tokenizer(directory: Path) -> None:
    """A tokenizer that splits at spaces; its pieces are the words of ``write_corpus``."""
    special = ("<s>", "<pad>", "</s>", "<unk>")
    words = (*special, *(f"w{number}" for number in range(NUM_WORDS)))
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    FastTokenizer(library.to_str().encode("utf-8"), {symbol: symbol for symbol in special}).save(directory)


def write_corpus(directory: Path, *, seed: int = 0, num_lines: int = 60, tokenizer: bool = True) -> Path:
    """What amos prepare leaves in one directory."""
    directory.mkdir(parents=True)
    dictionary = Dictionary()
    for word in range(NUM_WORDS):
        dictionary.add_symbol(f"w{word}", n=NUM_WORDS - word)
    dictionary.save(str(directory / "dict.txt"))
    write_split(directory, "train", num_lines, seed)
    write_split(directory, "valid", 20, seed + 100)
    if tokenizer:
        write_tokenizer(directory / "tokenizer")
        shutil.copy(directory / "dict.txt", directory / "tokenizer")
    return directory


def make_task(data: Path | str, **settings) -> TextPretrainingTask:
    values = {"data": str(data), "tokens_per_sample": TOKENS_PER_SAMPLE, "seed": 3, "save_dir": "unused"}
    values |= {"objective": "amos", "train_subset": "train", "update_freq": [1]} | settings
    return TextPretrainingTask.setup_task(OmegaConf.merge(OmegaConf.structured(TextPretrainingConfig), values))
