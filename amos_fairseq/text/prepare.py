"""``amos prepare text``: convert raw text to a binarized corpus for ``fairseq-train``.

Split (one pass over the inputs) -> vocabulary (from a sample) -> for each shard: encode -> publish.
"""

import argparse
import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import DICTIONARY_FILE
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.recipes import planned_text
from amos_fairseq.strangers import LARGEST_COUNT
from amos_fairseq.text import DEFAULT_VOCAB_SIZE, TEXT_COLUMN, text_workspace
from amos_fairseq.text import encoding as text_encoding
from amos_fairseq.text.binarizing import start_encoding_process
from amos_fairseq.text.processes import InOrder, in_own_process, number_of_processes, process_pool, use_threads
from amos_fairseq.text.special_tokens import LARGEST_VOCABULARY
from amos_fairseq.text.split import (
    Split,
    SplitSettings,
    TableDocuments,
    group_into_shards,
    size_of,
    split_corpus,
)
from amos_fairseq.text.table_files import files_of, is_table
from amos_fairseq.text.text_files import JSON_LINES, kind_and_compression, refuse_other_formats
from amos_fairseq.text.text_workspace import TextWorkspace
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.tokenization.conversion import from_sentencepiece
from amos_fairseq.text.vocabulary import learn_tokenizer
from amos_fairseq.text.workspace import check_paths

_MEGABYTE = 1_000_000
SIZES = ("tiny", "mini", "small", "base")


@dataclass(frozen=True)
class CorpusSettings:
    """The settings that determine the content of a corpus. ``tokenizer`` None: one of this kind is learned."""

    split: SplitSettings
    tokenizer: Tokenizer | None
    cased: bool
    bpe: str | None = None
    vocab_size: int | None = None

    def describe(self) -> dict[str, Any]:
        """Return the settings for ``corpus.json``; two runs with equal settings and inputs write the same bytes."""
        given = None if self.tokenizer is None else self.tokenizer.sha256
        vocabulary = {"bpe": self.bpe, "vocab_size": self.vocab_size, "tokenizer": given, "cased": self.cased}
        return vocabulary | vars(self.split)


def run(given: argparse.Namespace) -> None:
    """Write the corpus of the inputs to OUT, or continue an unfinished one.

    Raises:
        UserError: bad input; OUT is unchanged.
        OSError: for example the disk is full; finished parts stay for the next run.
    """
    # What can be checked is checked before any work.
    inputs, out = given.text, given.out
    check_paths(*inputs, out)
    _check_texts(inputs, given.text_column)
    if ":" in str(out):
        raise UserError(
            f"--out {out}: fairseq separates the shards of a corpus by colons, choose a name without colons"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a directory")
    settings, workers = _settings(given), number_of_processes(given.workers)
    description = settings.describe()
    if text_workspace.is_finished_corpus(out, description, inputs):
        say(f"{out} is finished already, with these inputs and settings: nothing to do")
        return
    with TextWorkspace(out, {"settings": description, "inputs": [_identify(path) for path in inputs]}) as work:
        if not work.continue_publishing():
            try:
                _run_stages(work, inputs, settings, workers)
            except UserError:
                work.discard()
                raise
    manifest = text_workspace.read_corpus_manifest(out)
    for line in _sizes(manifest["train"]["tokens"], manifest["valid"]["tokens"]):
        say(line)
    say(
        f"done: train with task.data={manifest['task_data']} (fairseq-train DATA); counts and hashes in {out}/corpus.json"
    )


def _sizes(train: int, valid: int) -> list[str]:
    """Return lines that say how much text that is; recipes of other objectives have other numbers of updates."""
    epochs = {name: planned_text(name) / train for name in (f"amos_{size}" for size in SIZES)}
    shown = (f"{name} {number:,.{1 if number < 10 else 0}f}" for name, number in epochs.items())
    return [
        f"{train:,} tokens to train on, {valid:,} to validate",
        f"epochs of this text in all updates of a recipe: {', '.join(shown)}; fewer with optimization.max_update=N",
    ]


def _run_stages(work: TextWorkspace, inputs: list[Path], settings: CorpusSettings, workers: int) -> None:
    split = work.load_split() or _split(work, inputs, settings)
    tokenizer = _vocabulary(work, settings, workers)
    shards = group_into_shards([file.bytes for file in split.train], settings.split.shard_bytes)
    with process_pool(workers, start_encoding_process, work.tokenizer) as in_order:
        counts = [
            work.load_counts(number) or _shard(work, split, shards, number, tokenizer, in_order)
            for number in range(len(shards))
        ]
    work.publish(len(shards), text_workspace.build_manifest(work.out, settings.describe(), split, tokenizer, counts))


def _split(work: TextWorkspace, inputs: list[Path], settings: CorpusSettings) -> Split:
    directory = work.unfinished("text")
    with progress_bar(sum(map(size_of, inputs)), "read", "B") as bar:
        split = split_corpus(inputs, directory, settings.split, bar.update)
    work.save_split(directory, split)
    work.finish(directory)
    return split


def _vocabulary(work: TextWorkspace, settings: CorpusSettings, workers: int) -> Tokenizer:
    if not work.tokenizer.is_dir():
        directory = work.unfinished("tokenizer")
        if settings.tokenizer is None:
            sample = work.text / "sample.txt"
            say(f"learn {settings.vocab_size} {settings.bpe} pieces from {sample.stat().st_size / 1e6:.1f} MB of text")
            in_own_process(functools.partial(_learn, sample, settings, workers), directory)
        else:
            settings.tokenizer.save(directory)
        work.finish(directory)
    return load_tokenizer(work.tokenizer)


def _learn(sample: Path, settings: CorpusSettings, workers: int, directory: Path) -> None:
    use_threads(workers)
    learn_tokenizer(sample, settings.bpe, settings.vocab_size, settings.cased).save(directory)


def _shard(
    work: TextWorkspace, split: Split, shards: list[list[int]], number: int, tokenizer: Tokenizer, in_order: InOrder
) -> dict[str, Any]:
    directory = work.unfinished(f"shard{number}")
    files = {"train": [work.text / split.train[index].name for index in shards[number]]}
    if number == 0:
        files["valid"] = [work.text / split.valid.name]
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    place = f" {number + 1}/{len(shards)}" if len(shards) > 1 else ""
    with progress_bar(size, f"encode{place}", "B") as bar:
        counts = {
            name: text_encoding.encode_files(paths, directory / name, tokenizer, in_order, bar.update)
            for name, paths in files.items()
        }
    for name, count in counts.items():
        if not count.pieces:
            raise UserError(f"the tokenizer encodes nothing of the {name} text: is it made for this language?")
    shutil.copyfile(work.tokenizer / DICTIONARY_FILE, directory / DICTIONARY_FILE)
    record = {name: text_workspace.with_shares(vars(count)) for name, count in counts.items()}
    record |= text_workspace.file_hashes(directory)
    work.save_counts(directory, record)
    work.finish(directory)
    for path in files["train"]:  # frees disk space
        path.unlink()
    return record


def _identify(path: Path) -> list[Any]:
    """Return what identifies an input of an unfinished run; a finished one is compared by content."""
    statuses = [file.stat() for file in files_of(path)]
    return [str(path.absolute()), *(value for status in statuses for value in (status.st_size, status.st_mtime_ns))]


def _check_texts(paths: list[Path], column: str | None) -> None:
    for path in paths:
        if is_table(path):
            TableDocuments(path).check_column(column or TEXT_COLUMN)
            continue
        refuse_other_formats(path)
        if not path.exists():
            raise UserError(f"{path}: no such file")
        if not path.is_file():
            raise UserError(f"{path} is not a file: give the files themselves, for example {path}/*")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: remove it from the inputs or fill it")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same input file is given twice")
    if column is not None and not any(is_table(path) or kind_and_compression(path)[0] in JSON_LINES for path in paths):
        raise UserError(f"--text-column {column}: no input has columns, they are all plain text: remove the flag")


def _settings(given: argparse.Namespace) -> CorpusSettings:
    if not 0 < given.valid_share < 1:
        raise UserError(f"--valid-share {given.valid_share} must be between 0 and 1")
    sizes = {}
    for name in ("shard", "valid", "sample"):
        megabytes = getattr(given, f"{name}_megabytes")
        if not 0.5 < megabytes * _MEGABYTE < LARGEST_COUNT:  # false for nan
            raise UserError(f"--{name}-megabytes {megabytes} must be a finite number greater than 0")
        sizes[f"{name}_bytes"] = round(megabytes * _MEGABYTE)
    column = TEXT_COLUMN if given.text_column is None else given.text_column
    split = SplitSettings(
        seed=given.seed, valid_share=given.valid_share, **sizes, text_column=column, csv_quotes=given.csv_quotes
    )
    if given.tokenizer is not None:
        tokenizer = _given_tokenizer(given)
        return CorpusSettings(split, tokenizer, tokenizer.cased)
    bpe = given.bpe or "sentencepiece"
    size = DEFAULT_VOCAB_SIZE if given.vocab_size is None else given.vocab_size
    if size < 1:
        raise UserError(f"--vocab-size {size} must be greater than 0")
    if size > LARGEST_VOCABULARY:
        raise UserError(f"--vocab-size {size} is too large: give at most {LARGEST_VOCABULARY:,}")
    cased = bpe == "sentencepiece" if given.cased is None else given.cased
    return CorpusSettings(split, None, cased, bpe, size)


def _given_tokenizer(given: argparse.Namespace) -> Tokenizer:
    for flag in ("vocab_size", "cased"):
        if getattr(given, flag) is not None:
            name = "--vocab-size" if flag == "vocab_size" else "--cased or --uncased"
            raise UserError(f"{name} cannot be combined with --tokenizer, which determines it: remove one of them")
    if given.tokenizer.suffix != ".model":
        return load_tokenizer(given.tokenizer)
    if not given.tokenizer.is_file():
        raise UserError(f"{given.tokenizer}: no such file")
    try:
        return from_sentencepiece(given.tokenizer.read_bytes())
    except UserError as error:
        raise UserError(f"{given.tokenizer}: {error}") from error
