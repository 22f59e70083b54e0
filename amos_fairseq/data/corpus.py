"""The binarized text of a corpus: checked, broken into blocks, and its tokens counted; its dictionary and tokenizer."""

import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset, _code_to_dtype
from torch import Tensor
from tqdm import tqdm

from amos_fairseq.errors import UserError
from amos_fairseq.files import (
    CORPUS_FILE,
    DICTIONARY_FILE,
    SETTINGS_FILE,
    TOKENIZER_DIRECTORY,
    directory_sha256,
    explain_write_errors,
    file_sha256,
    whole_folder,
)
from amos_fairseq.text import DICTIONARY_FILLER, MASK_SYMBOL
from amos_fairseq.text.tokenization import load_tokenizer, read_tokenizer
from amos_fairseq.text.tokenization.tokenizer import SPACE, UNK, Tokenizer
from amos_fairseq.text.tokenization.word_pieces import unspell_piece
from amos_fairseq.untrusted import read_json

logger = logging.getLogger(__name__)

_INDEX_HEADER = struct.Struct("<9sQBQ")  # magic, version, dtype, number of lines
# The first lines that a tokenizer is tried on, of which it may encode some otherwise: text that was decoded has no repeated
# spaces.
_TRIED_LINES, _MOST_DIFFERENT = 1000, 0.05
_BINARIZE_AGAIN = "copy the files again, or remove them and repeat amos prepare"

# Read at once when counting, a few tens of MB: enough that the counting, not the loop, takes the time.
TOKENS_AT_ONCE = 4_000_000


def require_split(path: str, hint: str = "give a directory that amos prepare or fairseq-preprocess wrote") -> None:
    """Check that a binarized text is there and whole, without reading it; ``hint``: what to do about one that is not."""
    if not is_whole(path):
        raise UserError(f"{path}.bin or {path}.idx is missing, empty or damaged: {hint}, or copy its files again")


def is_whole(path: str) -> bool:
    """Return whether both files of a memory-mapped text have the sizes that the index describes, and at least one line."""
    if not all(os.path.isfile(path + suffix) for suffix in (".bin", ".idx")):
        return False
    with open(path + ".idx", "rb") as file:
        magic, version, code, num_lines = _INDEX_HEADER.unpack(file.read(_INDEX_HEADER.size).ljust(_INDEX_HEADER.size))
        if magic != MMapIndexedDataset.Index._HDR_MAGIC or version != 1 or code not in _code_to_dtype:
            return False
        size = _INDEX_HEADER.size + num_lines * (4 + 8)  # int32 length and int64 position of each line
        if num_lines == 0 or os.path.getsize(path + ".idx") != size:
            return False
        file.seek(_INDEX_HEADER.size + 4 * (num_lines - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(size - 8)
        (position,) = struct.unpack("<q", file.read(8))
    return os.path.getsize(path + ".bin") == position + length * np.dtype(_code_to_dtype[code]).itemsize


def open_lines(path: str, hint: str) -> MMapIndexedDataset:
    """Open the lines of a memory-mapped file, after the checks of ``require_split``."""
    require_split(path, hint)
    return MMapIndexedDataset(path)


def check_prepared(directory: Path, manifest: str, split: str) -> None:
    """Refuse a split of prepared labels without one of its files: a task on pairs would become one on first texts."""
    content = read_json(directory / manifest, _BINARIZE_AGAIN, optional=True) or {}
    names = (name for name in content.get("sha256", {}) if Path(name).name.startswith((f"{split}.", DICTIONARY_FILE)))
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        raise UserError(f"{directory / missing[0]} is missing: {_BINARIZE_AGAIN}")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return ``corpus.json``, with its ``shards`` by their directories; None without one."""
    path = folder / CORPUS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = {"tokenizer_sha256": content["tokenizer"]["sha256"]}
        return content | {"shards": {record["directory"]: record | tokenizer for record in content["shards"]}}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not readable as the record of a corpus: {_BINARIZE_AGAIN}") from error


def shard_record(directory: Path) -> dict[str, Any] | None:
    """Return the record of a shard in the ``corpus.json`` of its folder or the one above, or None."""
    directory = directory.absolute()
    for folder, name in ((directory, "."), (directory.parent, directory.name)):
        manifest = _read_manifest(folder)
        if manifest and name in manifest["shards"]:
            return manifest["shards"][name]
    return None


def corpus_directories(directories: list[Path]) -> list[Path]:
    """Return the shards of corpora, given their directories, or the shards themselves."""
    shards: list[Path] = []
    for directory in directories:
        manifest = _read_manifest(directory)
        is_shard = manifest is None or "." in manifest["shards"]
        shards += [directory] if is_shard else [directory / name for name in manifest["shards"]]
    return shards


def verify_files(data: Sequence[Path]) -> int:
    """Read all files of a corpus and compare them with the hashes in ``corpus.json``; return the number of bytes."""
    hashes = {}
    for directory in data:
        record = shard_record(directory)
        if record is None:
            raise UserError(
                f"{directory} has no {CORPUS_FILE}: only a corpus of amos prepare can be verified; --tokenizer gives another "
                "one its tokenizer"
            )
        hashes |= {directory / name: sha256 for name, sha256 in record["sha256"].items()}
    size = sum(path.stat().st_size for path in hashes if path.is_file())
    with tqdm(total=size, desc="verify", unit="B", unit_scale=True, leave=False) as bar:
        for path, expected in hashes.items():
            if not path.is_file() or file_sha256(path, bar.update) != expected:
                raise UserError(f"{path} is missing, or not the file that amos prepare wrote: {_BINARIZE_AGAIN}")
    return size


def add_tokenizer(directories: list[Path], source: Path, vocabulary_file: Path | None = None) -> str:
    """Write ``tokenizer`` into the first directory of a corpus of fairseq-preprocess; return how well it fits.

    Pieces that ``dict.txt`` lacks are ``<unk>``. A symbol of ``dict.txt`` that is no piece may be a character that the
    tokenizer does not know, which SentencePiece writes as it is: lines with one, and those with ``<unk>``, are not compared.
    Refused if more than a twentieth of the lines, decoded to text and encoded again, are other ones.
    """
    target = directories[0] / TOKENIZER_DIRECTORY
    if _find_tokenizer(directories, None) is not None:
        raise UserError(f"{target} exists: the corpus has its tokenizer; remove that folder to give another one")
    vocabulary = Vocabulary.of_corpus(directories, None)
    dictionary, text = vocabulary.load_dictionary(), open_lines(str(directories[0] / "train"), _BINARIZE_AGAIN)
    numbers = range(min(len(text), _TRIED_LINES))
    tried = [[dictionary[index] for index in text[number].tolist()[:-1]] for number in numbers]
    # What SentencePiece would decode, by which its normalization is chosen.
    tokenizer = read_tokenizer(source, vocabulary_file, ["".join(line).replace(SPACE, " ") for line in tried])
    symbols = [
        symbol for symbol in dictionary.symbols[dictionary.nspecial : -1] if not symbol.startswith(DICTIONARY_FILLER)
    ]
    pieces = set(tokenizer.dictionary_symbols)
    others = [symbol for symbol in symbols if symbol not in pieces]
    unknown = {symbol for symbol in others if UNK in tokenizer.encode(unspell_piece(symbol))} | {dictionary.unk_word}
    tokenizer.use_dictionary_of_corpus(vocabulary.dictionary_file)
    lines = [line for line in tried if line and unknown.isdisjoint(line)]
    different = [
        line for line in lines if not pieces.issuperset(line) or tokenizer.encode(tokenizer.decode(line)) != line
    ]
    fit = (
        f"{len(symbols) - len(others):,} of the {len(symbols):,} symbols of {vocabulary.dictionary_file} are pieces of "
        f"{source}, and {len(lines) - len(different):,} of {len(lines):,} lines of the text are encoded as they are there "
        f"({len(tried) - len(lines):,} empty ones or with unknown characters were left out)"
    )
    if len(different) > _MOST_DIFFERENT * len(lines) or not lines:
        shown = f", first {' '.join(different[0])[:100]!r}" if different else ""
        raise UserError(f"{fit}{shown}: give the tokenizer that encoded this text")
    with whole_folder(target) as unfinished:
        tokenizer.save(unfinished)
    return f"{fit}; it is now in {target}"


class MappedBlocks(torch.utils.data.Dataset):
    """Blocks of a memory-mapped text, each one slice of the file. ``blocks``, which provides the slices, would read a block
    paragraph by paragraph and join them: a third of the time of a loader process."""

    def __init__(self, text: MMapIndexedDataset, blocks: TokenBlockDataset) -> None:
        self.text = text
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        start, end = (int(position) for position in self.blocks.slice_indices[index])
        dtype = np.dtype(self.text._index.dtype)
        ids = np.frombuffer(self.text._bin_buffer, dtype=dtype, count=end - start, offset=start * dtype.itemsize)
        return torch.from_numpy(ids.astype(np.int64))


def read_blocks(
    path: str, dictionary: Dictionary, tokens_per_block: int, break_mode: str, combine: bool = False
) -> MappedBlocks | TokenBlockDataset:
    """Return blocks of up to ``tokens_per_block`` - 1 tokens, which leaves room for ``<s>``; longer ones are not cut yet.

    ``break_mode``: none, complete or complete_doc, as in fairseq; ``combine``: append ``path``1, ``path``2, ...
    """
    size = tokens_per_block - 1
    tokens = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
    blocks = TokenBlockDataset(
        tokens, tokens.sizes, size, pad=dictionary.pad(), eos=dictionary.eos(), break_mode=break_mode
    )
    cut = int((blocks.sizes > size).sum())
    logger.info(f"{path}: {len(blocks)} blocks of up to {tokens_per_block} tokens, {cut} of them cut to that length")
    return MappedBlocks(tokens, blocks) if isinstance(tokens, MMapIndexedDataset) else blocks


def count_tokens(texts: Iterable[Any], num_tokens: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """Count all ids below ``num_tokens`` in memory-mapped texts: int64 [num_tokens]. Larger ids, of another dictionary, are
    refused where blocks are read. The counts of all ``num_ranks`` ranks add up to those of the whole."""
    counts = np.zeros(num_tokens, dtype=np.int64)
    # Some consist of a text and its continuations (train, train1, ...).
    for part in (part for text in texts for part in getattr(text, "datasets", [text])):
        # One array of the ids is read 30 times as fast as its lines.
        ids = np.frombuffer(part._bin_buffer, part._index.dtype)
        starts = range(rank * TOKENS_AT_ONCE, len(ids), num_ranks * TOKENS_AT_ONCE)
        for start in tqdm(starts, "counting tokens", unit="part", delay=5, leave=False, disable=rank > 0):
            counts += np.bincount(ids[start : start + TOKENS_AT_ONCE], minlength=num_tokens)[:num_tokens]
    return torch.from_numpy(counts)


def unigram_entropy(counts: Tensor) -> float:
    """Return the entropy of ``counts`` [tokens], in nats: no model without context has a lower loss. 0 for no tokens."""
    shares = counts[counts > 0].double() / counts.sum()
    return -float((shares * shares.log()).sum())


def shard_directories(data: str) -> list[Path]:
    """Return the directories of ``dir0:dir1``."""
    directories = [Path(path) for path in utils.split_paths(data) if path]
    if not directories or not all(directory.is_dir() for directory in directories):
        raise UserError(f"{data or 'an empty path'} is not a directory: give the directory that amos prepare wrote")
    return directories


@dataclass(frozen=True)
class Vocabulary:
    """The files that turn text into the ids of a corpus. A corpus without ``tokenizer_directory`` can be trained on too."""

    dictionary_file: Path
    dictionary_sha256: str
    tokenizer_directory: Path | None
    tokenizer_sha256: str | None

    @classmethod
    def of_corpus(cls, directories: list[Path], tokenizer_directory: str | None) -> "Vocabulary":
        """Find ``dict.txt`` of the first shard, and the tokenizer: as given, beside it, or for several shards one level up."""
        tokenizer = _find_tokenizer(directories, tokenizer_directory)
        folders = directories if tokenizer is None else [*directories, tokenizer]
        files = [folder / DICTIONARY_FILE for folder in folders]
        hashes = [file_sha256(file) if file.is_file() else None for file in files]
        for file, sha256 in zip(files, hashes, strict=True):
            if sha256 is None or sha256 != hashes[0]:
                raise UserError(
                    f"{file} is missing, or not the dictionary of {directories[0]}: give a directory that amos prepare, "
                    "fairseq-preprocess or amos verify --tokenizer wrote; all shards and the tokenizer have one dictionary"
                )
        return cls(files[0], hashes[0], tokenizer, None if tokenizer is None else directory_sha256(tokenizer))

    def load_tokenizer(self) -> Tokenizer | None:
        """Open the tokenizer, so that a damaged one is noticed before training and not when the finished run is exported."""
        if self.tokenizer_directory is None:
            return None
        record, tokenizer = shard_record(self.dictionary_file.parent), load_tokenizer(self.tokenizer_directory)
        if record and record["tokenizer_sha256"] != tokenizer.sha256:
            raise UserError(
                f"{self.tokenizer_directory} is not the tokenizer that binarized this corpus, or is damaged: copy it again, or "
                "repeat amos prepare"
            )
        return tokenizer

    def load_dictionary(self) -> Dictionary:
        try:
            dictionary = Dictionary.load(str(self.dictionary_file))
        except Exception as error:  # fairseq raises a bare Exception for a file that is not UTF-8
            raise UserError(f"{self.dictionary_file} is not a fairseq dictionary: {error}") from error
        dictionary.add_symbol(MASK_SYMBOL)
        return dictionary

    def fingerprints(self) -> dict[str, str | None]:
        """Return what a task stores in its checkpoints (``task_state``), for ``refuse_other``."""
        return {"dictionary_sha256": self.dictionary_sha256, "tokenizer_sha256": self.tokenizer_sha256}

    def refuse_other(self, task_state: dict[str, Any]) -> None:
        """Refuse a checkpoint's ``task_state`` that names another vocabulary."""
        for key, here in self.fingerprints().items():
            saved = task_state.get(key)
            if saved is not None and here is not None and saved != here:
                raise UserError(
                    f"the checkpoint was trained with another {key.split('_')[0]} than {self.dictionary_file} "
                    f"(sha256 {saved[:12]}..., here {here[:12]}...): use the vocabulary in its SAVE_DIR/tokenizer, "
                    "also to binarize further text (amos prepare --tokenizer)"
                )

    def copy_into(self, save_dir: str) -> Path:
        """Write ``SAVE_DIR/tokenizer`` once, completely or not at all: the tokenizer's files, or ``dict.txt`` alone."""
        target = Path(save_dir) / TOKENIZER_DIRECTORY
        if target.exists():
            if self._is_copied_to(target):
                return target
            raise UserError(
                f"{target} is damaged, or belongs to a run with another vocabulary than {self.dictionary_file}: give another "
                "--save-dir, or the corpus of that run"
            )
        explained = explain_write_errors(target, "make room, permit writing, or give another --save-dir")
        with explained, whole_folder(target) as unfinished:
            files = [self.dictionary_file] if self.tokenizer_directory is None else self.tokenizer_directory.iterdir()
            for source in files:
                if source.is_file() and not source.name.startswith("."):
                    shutil.copyfile(source, unfinished / source.name)
        return target

    def _is_copied_to(self, target: Path) -> bool:
        if self.tokenizer_sha256 is not None:
            return directory_sha256(target) == self.tokenizer_sha256
        copy = target / DICTIONARY_FILE
        return copy.is_file() and file_sha256(copy) == self.dictionary_sha256


def _find_tokenizer(directories: list[Path], flag: str | None) -> Path | None:
    if flag:
        return Path(flag)
    candidates = [directories[0] / TOKENIZER_DIRECTORY]
    if len(directories) > 1 or shard_record(directories[0]) is not None:
        candidates.append(directories[0].absolute().parent / TOKENIZER_DIRECTORY)
    # SAVE_DIR/tokenizer, given as data, is itself a tokenizer directory with its dictionary.
    if (directories[0] / SETTINGS_FILE).is_file():
        candidates.append(directories[0])
    return next((candidate for candidate in candidates if candidate.is_dir()), None)
