"""The dictionary and tokenizer of a corpus: found, checked against each other, and copied next to the checkpoints."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.data import Dictionary

from amos_fairseq.data.corpus import shard_record
from amos_fairseq.errors import UserError
from amos_fairseq.files import (
    DICTIONARY_FILE,
    SETTINGS_FILE,
    TOKENIZER_DIRECTORY,
    directory_sha256,
    explain_write_errors,
    file_sha256,
    whole_folder,
)
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer


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
        dictionary_file = directories[0] / DICTIONARY_FILE
        sha256 = _dictionary_sha256(dictionary_file)
        tokenizer = _find_tokenizer(directories, tokenizer_directory)
        for directory in [*directories[1:], *([] if tokenizer is None else [tokenizer])]:
            if _dictionary_sha256(directory / DICTIONARY_FILE) != sha256:
                raise UserError(
                    f"{directory / DICTIONARY_FILE} differs from {dictionary_file}: all shards of a corpus and its tokenizer "
                    "have one dictionary; binarize them together, or give the right --tokenizer-directory"
                )
        return cls(dictionary_file, sha256, tokenizer, None if tokenizer is None else directory_sha256(tokenizer))

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
        """Return what a task stores in its checkpoints (``task_state``), for :meth:`refuse_other`."""
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


def _dictionary_sha256(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path} is missing: give a directory that amos prepare or fairseq-preprocess wrote")
    return file_sha256(path)


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
