"""A seeded made-up corpus of documents, and what the tests of prepare.sh ask of its output."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Dict, Iterable, List, Tuple

from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset

from amos_fairseq.tokenization import load_tokenizer

Document = Tuple[str, ...]


def make_documents(number: int, seed: int = 5) -> List[Document]:
    """Documents of one to six paragraphs, with rare characters, special spellings and two exact copies."""
    generator = random.Random(seed)
    syllables = ["ba", "ke", "li", "mo", "nu", "ta", "re", "si", "on", "Ing"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(400)]
    words += ["<mask>", "</s>", "can't", "naïve", "中国", "☃"]
    documents = [
        tuple(" ".join(generator.choices(words, k=generator.randint(3, 30))) for _ in range(generator.randint(1, 6)))
        for _ in range(number - 1)
    ]
    return [*documents, documents[number // 2]]


DOCUMENTS = make_documents(240)
# Several shards of it, in a moment.
FLAGS = ["--vocab-size", "200", "--shard-megabytes", "0.03", "--valid-share", "0.05"]


def write_text(path: Path, documents: Iterable[Document]) -> Path:
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8")
    return path


def write_jsonl(path: Path, documents: Iterable[Document]) -> Path:
    path.write_text("".join(json.dumps({"text": "\n".join(d), "id": 1}) + "\n" for d in documents), encoding="utf-8")
    return path


def read_binarized(prefix: Path) -> List[Tuple[Tuple[int, ...], ...]]:
    """Documents as tuples of lines of ids, each line with its ``</s>``; cut at the lines that hold nothing else."""
    documents: List[List[Tuple[int, ...]]] = [[]]
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

    def encode(paragraph: str) -> Tuple[int, ...]:
        pieces = tokenizer.encode(paragraph)
        return (*(dictionary.index(piece) for piece in pieces), dictionary.eos())

    return Counter(tuple(encode(paragraph) for paragraph in document) for document in documents)


def shard_directories(out: Path) -> List[Path]:
    manifest = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    return [out / shard["directory"] for shard in manifest["shards"]]


def file_bytes(out: Path) -> Dict[str, bytes]:
    """Every file of a corpus by its relative name; ``corpus.json`` without the path that it names."""
    content = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(content["corpus.json"])
    manifest["task_data"] = manifest["task_data"].replace(str(out), "OUT")
    content["corpus.json"] = json.dumps(manifest).encode("utf-8")
    return content
