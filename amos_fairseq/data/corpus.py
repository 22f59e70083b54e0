"""The binarized text of a corpus: checked, broken into blocks, and its tokens counted."""

import functools
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.data.indexed_dataset import IndexedDataset, MMapIndexedDataset, _code_to_dtype
from torch import Tensor
from tqdm import tqdm

from amos_fairseq.errors import UserError
from amos_fairseq.files import CORPUS_FILE, DICTIONARY_FILE, file_sha256, file_version, sample_sha256
from amos_fairseq.untrusted import read_json

logger = logging.getLogger(__name__)

_INDEX_HEADER = struct.Struct("<9sQBQ")  # magic, version, dtype, number of lines
_BINARIZE_AGAIN = "copy the files again, or remove them and repeat amos prepare"

# Read at once when counting, a few tens of MB: enough that the counting, not the loop, takes the time.
TOKENS_AT_ONCE = 4_000_000
LINES_AT_ONCE = 10_000


def require_split(path: str, hint: str = "give a directory that amos prepare or fairseq-preprocess wrote") -> None:
    """Check a binarized text without reading all of it.

    The index must have the size that it states, and the text the size that follows from the index. Where amos prepare has
    stored a sample of both files in ``corpus.json``, the sample must be the same. ``hint``: what to do about a missing file.
    """
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(path + suffix):
            raise UserError(f"{path}{suffix} is missing: {hint}")
    if fault := index_fault(path):
        raise UserError(f"{path}{fault}: {_BINARIZE_AGAIN}")
    check_samples(path, file_version(path + ".bin"), file_version(path + ".idx"))


def index_fault(path: str) -> str | None:
    """Compare the index of a memory-mapped text with the sizes of both files; return what is wrong, None if nothing is."""
    if os.path.getsize(path + ".bin") == 0:
        return ".bin holds no tokens"
    with open(path + ".idx", "rb") as file:
        header = file.read(_INDEX_HEADER.size)
        if header[:8] == IndexedDataset._HDR_MAGIC:  # fairseq's older format
            return None
        magic, version, code, num_lines = _INDEX_HEADER.unpack(header.ljust(_INDEX_HEADER.size))
        if magic != MMapIndexedDataset.Index._HDR_MAGIC or version != 1 or code not in _code_to_dtype:
            return ".idx is not an index of fairseq"
        expected = _INDEX_HEADER.size + num_lines * (4 + 8)  # int32 length and int64 position of each line
        size = os.path.getsize(path + ".idx")
        if size != expected:
            return f".idx has {size} bytes, its {num_lines} lines need {expected}"
        file.seek(_INDEX_HEADER.size + 4 * (num_lines - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(expected - 8)
        (position,) = struct.unpack("<q", file.read(8))
    end = position + length * np.dtype(_code_to_dtype[code]).itemsize
    size = os.path.getsize(path + ".bin")
    return None if size == end else f".bin has {size} bytes, its index describes {end}"


@functools.lru_cache(maxsize=4096)
def check_samples(path: str, *versions: tuple[int, ...]) -> None:
    """Compare a text with the samples in ``corpus.json``, once in a process."""
    directory, split = os.path.split(path)
    samples = (shard_record(Path(directory)) or {}).get("sample_sha256", {})
    for name in (f"{split}.bin", f"{split}.idx"):
        if name in samples and sample_sha256(os.path.join(directory, name)) != samples[name]:
            raise UserError(f"{directory}/{name} is not the file that amos prepare wrote: {_BINARIZE_AGAIN}")


def check_prepared(directory: Path, manifest: str, split: str) -> None:
    """Read the files of a split of prepared labels, which are small, and compare them with the hashes in ``manifest``.

    A process reads a file once. Data without a manifest, or whose manifest has no hashes, are not compared.
    """
    content = read_json(directory / manifest, _BINARIZE_AGAIN, optional=True) or {}
    for name, expected in sorted(content.get("sha256", {}).items()):
        path = directory / name
        if not path.name.startswith((f"{split}.", DICTIONARY_FILE)):
            continue
        if not path.is_file() or expected != _sha256_of(str(path), file_version(str(path))):
            raise UserError(f"{path} is missing, or not the file that amos prepare wrote: {_BINARIZE_AGAIN}")


@functools.lru_cache(maxsize=4096)
def _sha256_of(path: str, version: tuple[int, ...]) -> str:
    return file_sha256(path)


def shard_record(directory: Path) -> dict[str, Any] | None:
    """Return the record of a shard in ``corpus.json``, with that of the corpus' tokenizer; None without ``corpus.json``."""
    directory = directory.absolute()
    for folder, name in ((directory, "."), (directory.parent, directory.name)):
        path = folder / CORPUS_FILE
        if not path.is_file():
            continue
        manifest = read_json(path, f"it is damaged, or was not written by amos prepare; {_BINARIZE_AGAIN}")
        try:
            records = {record["directory"]: record for record in manifest["shards"]}
            tokenizer = str(manifest["tokenizer"]["sha256"])
        except (TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged, or was not written by amos prepare: {_BINARIZE_AGAIN}") from error
        if name in records:
            return {**records[name], "tokenizer_sha256": tokenizer}
    return None


def corpus_directories(directories: list[Path], needs_all: bool = True) -> list[Path]:
    """Return the shards of a corpus, given its directory, the directories of its parts (``--shard``), or the shards themselves.

    ``needs_all``: refuse parts that are not all there, in order.
    """
    shards: list[Path] = []
    parts: list[Any] = []
    made_of: list[Any] = []
    for directory in directories:
        if not (directory / CORPUS_FILE).is_file() or shard_record(directory) is not None:
            shards.append(directory)
            continue
        manifest = read_json(directory / CORPUS_FILE, _BINARIZE_AGAIN)
        shards += [directory / record["directory"] for record in manifest["shards"]]
        settings = manifest.get("settings", {})
        if settings.get("part"):
            parts.append(settings.pop("part"))
            libraries = [manifest["versions"].get(name) for name in ("sentencepiece", "tokenizers")]
            made_of.append([settings, manifest["inputs"], manifest["tokenizer"], libraries])
    in_order = [[index, len(parts)] for index in range(len(parts))]
    if needs_all and (parts != in_order or any(each != made_of[0] for each in made_of)):
        raise UserError(
            f"{':'.join(map(str, directories))} is not the whole corpus: give the directories of all parts of amos prepare "
            "--shard, from 0 on, as DIR0:DIR1:...; all are made of the same inputs and settings, with the same libraries"
        )
    return shards


def verify_files(data: Sequence[Path]) -> int:
    """Read all files of a corpus and compare them with the hashes in ``corpus.json``; return the number of bytes."""
    hashes = {}
    for directory in data:
        record = shard_record(directory)
        if record is None:
            raise UserError(f"{directory} has no {CORPUS_FILE}: only a corpus of amos prepare can be verified")
        hashes |= {directory / name: sha256 for name, sha256 in record["sha256"].items()}
    size = sum(path.stat().st_size for path in hashes if path.is_file())
    with tqdm(total=size, desc="verify", unit="B", unit_scale=True, leave=False) as bar:
        for path, expected in hashes.items():
            if not path.is_file() or file_sha256(path, bar.update) != expected:
                raise UserError(f"{path} is missing, or not the file that amos prepare wrote: {_BINARIZE_AGAIN}")
    return size


def open_lines(path: str, hint: str) -> MMapIndexedDataset:
    """Open the lines of a memory-mapped file, after the checks of :func:`require_split` and of the position of each line."""
    require_split(path, hint)
    lines = MMapIndexedDataset(path)
    sizes = lines.sizes.astype(np.int64)
    starts = np.dtype(lines._index.dtype).itemsize * (np.cumsum(sizes) - sizes)
    if not np.array_equal(lines._index._pointers, starts):
        raise UserError(f"{path}.idx is damaged (lengths and positions of its lines differ): {_BINARIZE_AGAIN}")
    return lines


class MappedBlocks(torch.utils.data.Dataset):
    """Blocks of a memory-mapped text, each one slice of the file.

    fairseq's ``TokenBlockDataset``, which provides the slices, would read a block paragraph by paragraph and join
    them: a third of the time of a loader process.
    """

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
    if isinstance(tokens, MMapIndexedDataset):
        num_ids = len(tokens._bin_buffer) // np.dtype(tokens._index.dtype).itemsize
        if tokens.sizes.min() < 0 or tokens.sizes.sum(dtype=np.int64) != num_ids:
            raise UserError(f"{path}.idx is damaged (the lengths of its lines do not add up): {_BINARIZE_AGAIN}")
    blocks = TokenBlockDataset(
        tokens, tokens.sizes, size, pad=dictionary.pad(), eos=dictionary.eos(), break_mode=break_mode
    )
    cut = int((blocks.sizes > size).sum())
    logger.info(f"{path}: {len(blocks)} blocks of up to {tokens_per_block} tokens, {cut} of them cut to that length")
    return MappedBlocks(tokens, blocks) if isinstance(tokens, MMapIndexedDataset) else blocks


def count_tokens(texts: Iterable[Any], num_tokens: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """Count all ids below ``num_tokens`` in fairseq's indexed datasets: int64 [num_tokens].

    Larger ids, of another dictionary, are refused where blocks are read. The counts of all ``num_ranks`` ranks add up to those
    of the whole.
    """
    counts = np.zeros(num_tokens, dtype=np.int64)
    # Some consist of a text and its continuations (train, train1, ...).
    for part in (part for text in texts for part in getattr(text, "datasets", [text])):
        # One array of the ids of a memory-mapped text is read 30 times as fast as its lines.
        ids = np.frombuffer(part._bin_buffer, part._index.dtype) if isinstance(part, MMapIndexedDataset) else None
        length, step = (len(part), LINES_AT_ONCE) if ids is None else (len(ids), TOKENS_AT_ONCE)
        starts = range(rank * step, length, num_ranks * step)
        for start in tqdm(starts, "counting tokens", unit="part", delay=5, leave=False, disable=rank > 0):
            places = range(start, min(start + step, length))
            several = torch.cat([part[i] for i in places]).numpy() if ids is None else ids[start : places.stop]
            counts += np.bincount(several, minlength=num_tokens)[:num_tokens]
    return torch.from_numpy(counts)


def unigram_entropy(counts: Tensor) -> float:
    """Return the entropy of ``counts`` [tokens], in nats: no model without context has a lower loss. 0 for no tokens."""
    shares = counts[counts > 0].double() / counts.sum()
    return -float((shares * shares.log()).sum())
