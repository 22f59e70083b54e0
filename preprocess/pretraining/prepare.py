"""Convert raw text to a binarized corpus for ``fairseq-train``; see ``amos prepare --help``.

Split (one pass over the inputs) -> vocabulary (from a sample) -> for each shard: encode -> publish.
"""

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.fingerprint import DICTIONARY_FILE
from amos_fairseq.preprocess.common.command import (
    check_names,
    ending_in_one_line,
    number_of_processes,
    progress_bar,
    say,
)
from amos_fairseq.preprocess.common.processes import (
    end_children_with_this_process,
    in_own_process,
    process_pool,
    use_threads,
)
from amos_fairseq.preprocess.common.reading import refuse_other_formats
from amos_fairseq.preprocess.pretraining import encoding, manifest
from amos_fairseq.preprocess.pretraining.arguments import DEFAULT_VOCAB_SIZE, DESCRIPTION, add_arguments
from amos_fairseq.preprocess.pretraining.splitting import Split, SplitSettings, group_into_shards, split_corpus
from amos_fairseq.preprocess.pretraining.vocabulary import learn_tokenizer
from amos_fairseq.preprocess.pretraining.workspace import Workspace
from amos_fairseq.special_tokens import LARGEST_VOCABULARY
from amos_fairseq.strangers import LARGEST_COUNT
from amos_fairseq.tokenization import load_tokenizer
from amos_fairseq.tokenization.conversion import from_sentencepiece
from amos_fairseq.tokenization.tokenizer import Tokenizer

_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of a corpus. ``bpe`` None: a tokenizer was given."""

    split: SplitSettings
    bpe: Optional[str]
    vocab_size: Optional[int]
    cased: Optional[bool]

    def describe(self, tokenizer: Optional[Tokenizer]) -> Dict[str, Any]:
        """Return the settings for ``corpus.json``; two runs with equal settings and inputs write the same bytes."""
        vocabulary = (
            {"tokenizer": tokenizer.sha256, "cased": tokenizer.cased}
            if tokenizer is not None
            else {"tokenizer": None, "cased": self.cased}
        )
        return {"bpe": self.bpe, "vocab_size": self.vocab_size, **vocabulary, **vars(self.split)}


def prepare(inputs: List[Path], out: Path, settings: Settings, workers: int, tokenizer: Optional[Tokenizer]) -> None:
    """Write the corpus of ``inputs`` to ``out``, or continue an unfinished one.

    Args:
        tokenizer: None to learn one.

    Raises:
        UserError: bad input; ``out`` is unchanged.
        OSError: for example the disk is full; finished parts stay for the next run.
    """
    description = settings.describe(tokenizer)
    if manifest.is_finished(out, description, inputs):
        say(f"{out} is finished already, with these inputs and settings: nothing to do")
        return
    with Workspace(out, {"settings": description, "inputs": [_identify(path) for path in inputs]}) as work:
        if not work.continue_publishing():
            try:
                _run_stages(work, inputs, settings, description, workers, tokenizer)
            except UserError:
                work.discard()
                raise
    say(f"done: train with task.data={_task_data(out)} (fairseq-train DATA); counts and hashes in {out}/corpus.json")


def _run_stages(
    work: Workspace,
    inputs: List[Path],
    settings: Settings,
    description: Dict[str, Any],
    workers: int,
    tokenizer: Optional[Tokenizer],
) -> None:
    split = work.load_split() or _split(work, inputs, settings)
    tokenizer = _vocabulary(work, settings, workers, tokenizer)
    shards = group_into_shards([piece.bytes for piece in split.pieces], settings.split.shard_bytes)
    with process_pool(workers, encoding.start_encoding_process, str(work.tokenizer)) as pool:
        counts = [
            work.load_counts(number) or _shard(work, split, shards, number, tokenizer, pool, workers)
            for number in range(len(shards))
        ]
    work.publish(len(shards), manifest.build_manifest(work.out, description, split, tokenizer, counts))


def _split(work: Workspace, inputs: List[Path], settings: Settings) -> Split:
    directory = work.unfinished(work.text)
    with progress_bar(sum(path.stat().st_size for path in inputs), "read", "B") as bar:
        split = split_corpus(inputs, directory, settings.split, bar.update)
    work.save_split(directory, split)
    work.finish(directory)
    return split


def _vocabulary(work: Workspace, settings: Settings, workers: int, tokenizer: Optional[Tokenizer]) -> Tokenizer:
    if not work.tokenizer.is_dir():
        directory = work.unfinished(work.tokenizer)
        if tokenizer is None:
            sample = work.text / "sample.txt"
            say(f"learn {settings.vocab_size} {settings.bpe} pieces from {sample.stat().st_size / 1e6:.1f} MB of text")
            in_own_process(_learn, sample, settings, workers, directory)
        else:
            tokenizer.save(directory)
        work.finish(directory)
    return load_tokenizer(work.tokenizer)


def _learn(sample: Path, settings: Settings, workers: int, directory: Path) -> None:
    use_threads(workers)
    learn_tokenizer(sample, settings.bpe, settings.vocab_size, settings.cased).save(directory)


def _shard(
    work: Workspace, split: Split, shards: List[List[int]], number: int, tokenizer: Tokenizer, pool: Any, workers: int
) -> Dict[str, Any]:
    directory = work.unfinished(work.shard(number))
    files = {"train": [work.text / split.pieces[index].name for index in shards[number]]}
    if number == 0:
        files["valid"] = [work.text / split.valid.name]
    size = sum(path.stat().st_size for paths in files.values() for path in paths)
    place = f" {number + 1}/{len(shards)}" if len(shards) > 1 else ""
    with progress_bar(size, f"encode{place}", "B") as bar:
        counts = {
            name: encoding.encode_files(paths, directory / name, tokenizer, pool, workers, bar.update)
            for name, paths in files.items()
        }
    _refuse_empty(counts)
    shutil.copyfile(work.tokenizer / DICTIONARY_FILE, directory / DICTIONARY_FILE)
    record = {name: manifest.describe(count) for name, count in counts.items()}
    record |= manifest.file_hashes(directory)
    work.save_counts(directory, record)
    work.finish(directory)
    for path in files["train"]:  # frees disk space
        path.unlink()
    return record


def _refuse_empty(counts: Dict[str, encoding.Counts]) -> None:
    for name, count in counts.items():
        if not count.pieces:
            raise UserError(f"the tokenizer encodes nothing of the {name} text: is it made for this language?")


def _identify(path: Path) -> List[Any]:
    """Return what identifies an input of an unfinished run; a finished one is compared by content."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def _task_data(out: Path) -> str:
    return manifest.read_manifest(out)["task_data"]


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """Run ``prepare.sh``. Exit with code 1 and one line on a user's mistake, with code 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "prepare.sh", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    run(parser.parse_args(arguments))


def run(given: argparse.Namespace) -> None:
    """Check the arguments and prepare the corpus.

    Raises:
        UserError: bad input; nothing was written.
    """
    with ending_in_one_line("it continues after the last finished part"):
        # What can be checked is checked before any work.
        check_names(*given.text, given.out)
        _check_inputs(given.text)
        if ":" in str(given.out):
            raise UserError(
                f"--out {given.out}: fairseq separates the shards of a corpus by colons, choose a name without colons"
            )
        if given.out.exists() and not given.out.is_dir():
            raise UserError(f"--out {given.out} is not a directory")
        settings, workers = _settings(given), number_of_processes(given.workers)
        prepare(given.text, given.out, settings, workers, _given_tokenizer(given))


def _check_inputs(paths: List[Path]) -> None:
    for path in paths:
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


def _settings(given: argparse.Namespace) -> Settings:
    if not 0 < given.valid_share < 1:
        raise UserError(f"--valid-share {given.valid_share} must be between 0 and 1")
    sizes = {}
    for name in ("shard", "valid", "sample"):
        megabytes = getattr(given, f"{name}_megabytes")
        if not 0.5 < megabytes * _MEGABYTE < LARGEST_COUNT:  # false for nan
            raise UserError(f"--{name}-megabytes {megabytes} must be a finite number greater than 0")
        sizes[f"{name}_bytes"] = round(megabytes * _MEGABYTE)
    split = SplitSettings(seed=given.seed, valid_share=given.valid_share, **sizes)
    if given.tokenizer is not None:
        return Settings(split, None, None, None)
    bpe = given.bpe or "sentencepiece"
    size = DEFAULT_VOCAB_SIZE if given.vocab_size is None else given.vocab_size
    if size < 1:
        raise UserError(f"--vocab-size {size} must be greater than 0")
    if size > LARGEST_VOCABULARY:
        raise UserError(f"--vocab-size {size} is too large: give at most {LARGEST_VOCABULARY:,}")
    return Settings(split, bpe, size, bpe == "sentencepiece" if given.cased is None else given.cased)


def _given_tokenizer(given: argparse.Namespace) -> Optional[Tokenizer]:
    if given.tokenizer is None:
        return None
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


if __name__ == "__main__":
    end_children_with_this_process()
    main()
